"""What the function must do that cuts a model as a plan says."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.language_model import PARTS, train
from mgpu_tutorial.language_model.plan import Plan, cut_model, mesh_of


def _parts(rank: int, world_size: int, cut: Callable, wanted: Plan) -> tuple:
    """The numbers of the layers that this rank keeps; what it shares, and with whom."""
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(6)))
    shared = {}

    def share(block: nn.Module, group: dist.ProcessGroup) -> None:
        shared[list(model).index(block)] = dist.get_process_group_ranks(group)

    mesh = mesh_of(wanted, torch.get_default_device().type)
    layers = list(model)
    mine = cut(model, mesh, share)
    if mine is None:
        return "nothing was returned. Is a `return` missing?", shared
    strange = [layer for layer in mine if layer not in layers]
    said = "is no layer of the model. `share` cuts a block in place, and returns nothing"
    assert not strange, f"{strange[0]} {said}"
    return [layers.index(layer) for layer in mine], shared


def _look(cut: Callable, wanted: Plan, which: int, expected: list) -> None:
    results = launch(_parts, wanted.ranks, cut, wanted).results
    what = ("layers (0 is the embedding, 1 to 4 are blocks, 5 is the head)", "shared blocks")
    for rank, found in enumerate(results):
        where = f"{wanted}, rank {rank}: its {what[which]}"
        seen = f"{where}: {found[which]}, expected {expected[rank]}"
        assert found[which] == expected[rank], seen


def keeps_the_model(cut: Callable) -> None:
    """keep all layers in their order on a single rank"""
    _look(cut, Plan(dp=2), 0, [list(range(6))] * 2)


def cuts_into_stages(cut: Callable) -> None:
    """give each stage its blocks, the first the embedding too, and the last the head"""
    _look(cut, Plan(pp=4), 0, [[0, 1], [2], [3], [4, 5]])
    _look(cut, Plan(dp=2, pp=2), 0, [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]])


def shares_its_blocks(cut: Callable) -> None:
    """share each block of its stage, and nothing else, with the ranks of its tp group"""
    blocks = [1, 2, 3, 4]
    groups = [[0, 1], [0, 1], [2, 3], [2, 3]]
    _look(cut, Plan(dp=2, tp=2), 1, [dict.fromkeys(blocks, group) for group in groups])
    stages = [[1, 2], [1, 2], [3, 4], [3, 4]]
    pairs = zip(stages, groups, strict=True)
    _look(cut, Plan(tp=2, pp=2), 1, [dict.fromkeys(mine, group) for mine, group in pairs])


def _train_with(rank: int, world_size: int, cut: Callable) -> list[float]:
    parts = SimpleNamespace(**vars(PARTS) | {"cut_model": cut})
    return train(rank, world_size, "tp=2,pp=2", steps=2, dtype="float64", parts=parts)


def trains_like_one(cut: Callable) -> None:
    """make four ranks train as one process does"""
    (one,) = launch(train, 1, "dp=1", steps=2, dtype="float64").results
    for rank, losses in enumerate(launch(_train_with, 4, cut).results):
        expect(losses, one, f"rank {rank}: the losses of two steps", within=1e-9)


build = Builder(
    "language_model",
    {cut_model: [keeps_the_model, cuts_into_stages, shares_its_blocks, trains_like_one]},
)
