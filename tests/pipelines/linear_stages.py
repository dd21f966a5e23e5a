"""Work for the ranks: two linear maps a stage, and what one process makes of them."""

import torch
from torch.nn.functional import cross_entropy

from tests.model_parallel.reference import equal_stacks, one_process


class LinearStages:
    """Each stage has one of the equal stacks in float64, kept to look at."""

    def __init__(self, count, width=4, samples=12):
        self.width, self.samples = width, samples
        self.stacks = [stack.double() for stack in equal_stacks(2, width, count)]

    def batch(self, micro):
        draw = torch.Generator().manual_seed(0)
        numbers = torch.randn(self.samples, self.width, generator=draw, dtype=torch.float32)
        return numbers.double(), torch.arange(self.samples) % self.width

    def module(self, index):
        return self.stacks[index]

    def shape(self, index, micro):
        return [self.samples // micro, self.width]

    def loss(self, output, target):
        return cross_entropy(output, target)


def expected_of(count, micro):
    """The mean loss and the gradients of each stage, of one process."""
    work = LinearStages(count)
    loss, _ = one_process(torch.nn.Sequential(*work.stacks), *work.batch(micro), micro)
    return loss, [[p.grad for p in stack.parameters()] for stack in work.stacks]
