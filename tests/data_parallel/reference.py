"""Compare the four stages of our DataParallel with those of torch.nn.DataParallel."""

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

EXACT = {"rtol": 0, "atol": 0}


def compare_stages(several: Sequence[torch.device]) -> None:
    """Take one step through both, stage by stage; AssertionError where they part."""
    torch.manual_seed(0)
    mine = PixelNet(hidden=4).to(several[0])
    theirs = nn.DataParallel(copy.deepcopy(mine), [d.index for d in several])
    images = torch.randn(10, 3, 8, 8).to(several[0])
    labels = torch.randint(20, (10, 8, 8)).to(several[0])

    pieces = wrapper.scatter((images,), several)
    their_pieces, their_kwargs = theirs.scatter((images,), {}, theirs.device_ids)
    torch.testing.assert_close(pieces, list(their_pieces), **EXACT)
    used = several[: len(pieces)]

    replicas = wrapper.replicate(mine, used)
    their_replicas = theirs.replicate(theirs.module, theirs.device_ids[: len(pieces)])
    for a, b in zip(replicas, their_replicas, strict=True):
        for name in ("conv.weight", "norm.bias", "norm.running_mean", "head.bias"):
            owner, _, leaf = name.partition(".")
            pair = [getattr(getattr(replica, owner), leaf) for replica in (a, b)]
            torch.testing.assert_close(*pair, **EXACT)

    outputs = wrapper.parallel_apply(replicas, pieces, used)
    their_outputs = theirs.parallel_apply(their_replicas, their_pieces, their_kwargs)
    torch.testing.assert_close(outputs, their_outputs)

    output = wrapper.gather(outputs, several[0])
    their_output = theirs.gather(their_outputs, theirs.output_device)
    torch.testing.assert_close(output, their_output)

    for found in (output, their_output):
        cross_entropy(found, labels).backward()
    for a, b in zip(mine.parameters(), theirs.module.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    for a, b in zip(mine.buffers(), theirs.module.buffers(), strict=True):
        torch.testing.assert_close(a, b)

    few = images[: len(several) - 1]  # PyTorch leaves a device idle; ours refuses
    assert len(theirs.scatter((few,), {}, theirs.device_ids)[0]) == len(several) - 1

    again = wrapper.DataParallel(mine, several)(images)
    torch.testing.assert_close(again, theirs(images))


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
