"""What the functions must do that cut a model, make its optimizer, and take a step."""

from collections.abc import Callable, Sequence
from functools import cache
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.language_model import PARTS, train
from mgpu_tutorial.language_model.model import new_model
from mgpu_tutorial.language_model.plan import cut_model, mesh_of, plan_of
from mgpu_tutorial.language_model.rank import build_rank, new_adam, take_step


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


def _owned(rank: int, world_size: int, make: Callable, plan: str) -> tuple:
    """The owners, the numbers of what Adam steps, its rate, and how many there are."""
    sizes = plan_of(plan)
    job = build_rank(new_model(), sizes, mesh_of(sizes), PARTS)
    made = make(job, PARTS, 0.5)
    assert isinstance(made, tuple) and len(made) == 2, (
        f"expected adam and owner, got {made!r:.60}"
    )
    adam, owner = made
    (stepped,) = [group["params"] for group in adam.param_groups]
    number = {id(p): i for i, p in enumerate(job.stage.parameters())}
    return list(owner), [number[id(p)] for p in stepped], adam.defaults["lr"], len(number)


def steps_all(make: Callable) -> None:
    """give each rank all that it has to step, at the rate `lr`, where nothing is owned"""
    for rank, (owner, mine, lr, count) in enumerate(launch(_owned, 2, make, "dp=2").results):
        expect(owner, [rank] * count, f"dp=2, rank {rank}: the owners")
        expect(mine, [*range(count)], f"dp=2, rank {rank}: what Adam steps")
        expect(lr, 0.5, f"dp=2, rank {rank}: the rate")


def steps_its_own(make: Callable) -> None:
    """with zero=1 give each rank its own parameters, by the owners among `job.data`"""
    for plan, ranks in ("dp=2,zero=1", 2), ("dp=2,tp=2,zero=1", 4), ("dp=2,cp=2,zero=1", 4):
        sizes = plan_of(plan)
        for rank, found in enumerate(launch(_owned, ranks, make, plan).results):
            owner, mine, _, count = found
            me = rank // sizes.tp % (sizes.dp * sizes.cp)
            who = [owner.count(each) for each in range(sizes.dp * sizes.cp)]
            where = f"{plan}, rank {rank}, which is rank {me} of job.data"
            assert len(owner) == sum(who) == count and all(who), (
                f"{where}: of {count} parameters its ranks own {who}"
            )
            wanted = [i for i, each in enumerate(owner) if each == me]
            expect(mine, wanted, f"{where}: the numbers of what Adam steps")


def _hundredfold(scores: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss whose gradients are clipped in the first step."""
    return 100 * cross_entropy(scores, targets)


STEPS = {"steps": 3, "dtype": "float64", "loss_of": _hundredfold, "timeout": 30}


@cache
def _alone() -> list[float]:
    """The losses of one process."""
    return launch(train, 1, "dp=1", **STEPS).results[0]


def _same_steps(plans: Sequence[str], **parts: Callable) -> None:
    """Three steps in float64, in which gradients are clipped, as one process takes them."""
    one, own = _alone(), SimpleNamespace(**vars(PARTS) | parts)
    for plan in plans:
        found = launch(train, plan_of(plan).ranks, plan, parts=own, **STEPS).results
        for rank, losses in enumerate(found):
            for step, (loss, wanted) in enumerate(zip(losses, one, strict=True)):
                what = f"{plan}, rank {rank}: the loss of step {step}, of one hundredfold"
                expect(loss, wanted, what, within=1e-9)


def clips(make: Callable) -> None:
    """clip as one process does, before each step"""
    _same_steps(["tp=2", "dp=2,zero=1", "dp=2,zero=3"], new_adam=make)


def shares_the_batch(take: Callable) -> None:
    """return the mean loss of the whole batch, where dp ranks share it"""
    _same_steps(["dp=1", "dp=2"], take_step=take)


def knows_the_loss(take: Callable) -> None:
    """return it also where cp ranks share each sequence, and the last stage computes it"""
    _same_steps(["cp=2", "pp=2"], take_step=take)


def steps_owned(take: Callable) -> None:
    """step by owners with zero=1, and with zero=3 what is sharded"""
    _same_steps(["dp=2,zero=1", "dp=2,zero=3"], take_step=take)


build = Builder(
    "language_model",
    {
        cut_model: [cuts_into_stages, shares_its_blocks, trains_like_one],
        new_adam: [steps_all, steps_its_own, clips],
        take_step: [shares_the_batch, knows_the_loss, steps_owned],
    },
)
