"""What every split of the work must equal: one process, one micro-batch after the other."""

import torch
from torch.nn.functional import cross_entropy


def one_process(model, images, labels, micro):
    """The mean loss, and the gradients, of `micro` parts one after the other."""
    losses = []
    for x, y in zip(images.chunk(micro), labels.chunk(micro), strict=True):
        loss = cross_entropy(model(x), y)
        (loss / micro).backward()
        losses.append(loss.item())
    return sum(losses) / micro, [parameter.grad for parameter in model.parameters()]


def equal_stacks(depth, width, count):
    """`count` layers of `depth` linear maps each, the same in every process."""
    torch.manual_seed(0)
    return [
        torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))
        for _ in range(count)
    ]
