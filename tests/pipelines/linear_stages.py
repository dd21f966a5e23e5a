"""Work for the ranks: two linear maps a stage, and what one process makes of them."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy


class LinearStages:
    """Stages in float64, the same in every process, kept to look at."""

    loss = staticmethod(cross_entropy)
    dtype = torch.float64

    def __init__(self, count):
        torch.manual_seed(0)
        pairs = [(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(count)]
        self.stacks = [nn.Sequential(*pair).double() for pair in pairs]

    def batch(self, micro):
        torch.manual_seed(1)
        return torch.randn(12, 4, dtype=torch.float64), torch.arange(12) % 4

    def module(self, index):
        return self.stacks[index]

    def shape(self, index, micro):
        return [12 // micro, 4]


def expected_of(count, micro):
    """The gradients of each stage, of one process: one micro-batch after the other."""
    work = LinearStages(count)
    whole, batch = nn.Sequential(*work.stacks), work.batch(micro)
    for x, y in zip(*(part.chunk(micro) for part in batch), strict=True):
        (cross_entropy(whole(x), y) / micro).backward()
    return [[p.grad for p in stack.parameters()] for stack in work.stacks]
