"""Compare steps of our DataParallel with those of torch.nn.DataParallel."""

import copy
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.data_parallel import wrapper
from mgpu_tutorial.data_parallel.experiments import PixelNet


def compare_steps(several: Sequence[torch.device]) -> None:
    """Take two steps through both; AssertionError where they part."""
    torch.manual_seed(0)
    ours = wrapper.DataParallel(PixelNet(hidden=4).to(several[0]), several)
    theirs = nn.DataParallel(copy.deepcopy(ours.module), [d.index for d in several])
    images = torch.randn(2, 10, 3, 8, 8).to(several[0])
    labels = torch.randint(20, (10, 8, 8)).to(several[0])
    for batch in images:
        outputs = [model(batch) for model in (ours, theirs)]
        torch.testing.assert_close(*outputs)
        for output in outputs:
            cross_entropy(output, labels).backward()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
