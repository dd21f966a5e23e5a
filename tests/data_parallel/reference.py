"""Compare steps of our DataParallel with those of torch.nn.DataParallel."""

import copy
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.data_parallel import wrapper
from mgpu_tutorial.data_parallel.experiments import PixelNet
from mgpu_tutorial.lab import place


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


def on_virtual_devices(monkeypatch) -> None:
    """Let torch.nn.DataParallel run on virtual devices: only CUDA's copies are replaced."""
    from torch.nn.parallel import comm

    def at(index: int) -> torch.device:
        return torch.device("virtual", index)

    def cut(tensor, targets, sizes=None, dim=0, streams=None):
        parts = tensor.split(sizes, dim) if sizes else tensor.chunk(len(targets), dim)
        return tuple(place(p, at(t)) for p, t in zip(parts, targets, strict=False))

    def broadcast(tensors, targets, *_):
        first = tensors[0].device
        return [
            list(tensors) if at(t) == first else [place(x, at(t)) for x in tensors]
            for t in targets
        ]

    def add_up(columns, destination, *_):
        moved = [[place(x, at(destination)) for x in column] for column in columns]
        return [sum(row[1:], row[0]) for row in zip(*moved, strict=True)]

    def join(tensors, dim, destination):
        return torch.cat([place(t, at(destination)) for t in tensors], dim)

    monkeypatch.setattr(comm, "scatter", cut)
    monkeypatch.setattr(comm, "broadcast_coalesced", broadcast)
    monkeypatch.setattr(comm, "reduce_add_coalesced", add_up)
    monkeypatch.setattr(comm, "gather", join)
    theirs = sys.modules["torch.nn.parallel.data_parallel"]  # a function hides the module
    monkeypatch.setattr(theirs, "_get_available_device_type", lambda: "virtual")
    here = {
        "is_available": lambda: True,
        "current_accelerator": lambda: SimpleNamespace(type="cpu"),
        "current_stream": lambda *_: nullcontext(),
        "device_index": lambda *_: nullcontext(),
    }
    for name, function in here.items():
        monkeypatch.setattr(torch.accelerator, name, function)
