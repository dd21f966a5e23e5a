"""What the function must do that cuts a model as a plan says."""

from collections.abc import Callable
from types import SimpleNamespace

import torch.distributed as dist
from torch import nn

from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.language_model import PARTS, train
from mgpu_tutorial.language_model.plan import cut_model, mesh_of, plan_of


def _parts(rank: int, world_size: int, cut: Callable, plan: str) -> tuple:
    """The numbers of the layers that this rank keeps; what it shares, and with whom."""
    layers, shared = [nn.Linear(1, 1) for _ in range(6)], {}

    def share(block: nn.Module, group: dist.ProcessGroup) -> None:
        shared[layers.index(block)] = dist.get_process_group_ranks(group)

    mine = cut(nn.Sequential(*layers), mesh_of(plan_of(plan)), share)
    assert mine is not None, "nothing was returned. Is a `return` missing?"
    said = "is no layer of the model. `share` cuts a block in place, and returns nothing"
    for layer in mine:
        assert layer in layers, f"{layer} {said}"
    return [layers.index(layer) for layer in mine], shared


def _look(cut: Callable, plan: str, expected: list) -> None:
    """Compare the layers of each rank, or what it shares, where a dict is expected."""
    which = isinstance(expected[0], dict)
    what = ("layers (0 is the embedding, 1 to 4 are blocks, 5 is the head)", "shared blocks")
    results = launch(_parts, len(expected), cut, plan).results
    for rank, (found, wanted) in enumerate(zip(results, expected, strict=True)):
        seen = f"{plan}, rank {rank}: its {what[which]}: {found[which]}, expected {wanted}"
        assert found[which] == wanted, seen


def cuts_into_stages(cut: Callable) -> None:
    """give each stage its blocks, the first the embedding too, and the last the head"""
    _look(cut, "dp=2", [[0, 1, 2, 3, 4, 5]] * 2)
    _look(cut, "pp=4", [[0, 1], [2], [3], [4, 5]])
    _look(cut, "dp=2,pp=2", [[0, 1, 2]] * 2 + [[3, 4, 5]] * 2)


def shares_its_blocks(cut: Callable) -> None:
    """share each block of its stage, and nothing else, with the ranks of its tp group"""
    first, second = dict.fromkeys([1, 2], [0, 1]), dict.fromkeys([3, 4], [2, 3])
    _look(cut, "tp=2,pp=2", [first] * 2 + [second] * 2)
    low, high = (dict.fromkeys([1, 2, 3, 4], group) for group in ([0, 1], [2, 3]))
    _look(cut, "dp=2,tp=2", [low] * 2 + [high] * 2)


def trains_like_one(cut: Callable) -> None:
    """make four ranks train as one process does"""
    how = {"steps": 2, "dtype": "float64"}
    (one,) = launch(train, 1, "dp=1", **how).results
    parts = SimpleNamespace(**vars(PARTS) | {"cut_model": cut})
    for plan in "tp=2,pp=2", "pp=4":
        found = launch(train, 4, plan, parts=parts, **how).results
        for rank, losses in enumerate(found):
            what = f"{plan}, rank {rank}: the losses of two steps"
            expect(losses, one, what, within=1e-9)


build = Builder(
    "language_model", {cut_model: [cuts_into_stages, shares_its_blocks, trains_like_one]}
)
