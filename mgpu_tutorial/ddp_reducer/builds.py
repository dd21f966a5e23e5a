"""What the reader's communication hook must do."""

import inspect
from collections.abc import Callable
from copy import deepcopy

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.experiments import Tower
from mgpu_tutorial.ddp_reducer.hooks import signs_with_feedback
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.lab.teach.groups import expect_in_groups


def gradients_of(
    rank: int, world_size: int, hook: Callable, steps: int
) -> tuple[list, list, list]:
    """Each step's gradients through the hook and without it, and the state at the end."""
    torch.manual_seed(0)
    plain, rest = Tower(16, depth=3), {}
    model = DistributedDataParallel(deepcopy(plain))
    model.register_comm_hook(rest, hook)
    torch.manual_seed(rank)
    sent, exact = [], []
    for _ in range(steps):
        inputs = torch.randn(8, 16)
        for net, seen in ((model, sent), (plain, exact)):
            net.zero_grad()
            net(inputs).square().mean().backward()
            seen.append([p.grad.clone() for p in net.parameters()])
    return sent, exact, [rest.get(p) for p in model.module.parameters()]


def keeps_the_rest(function: Callable) -> None:
    """send, in the first step, the signs times the mean size, and keep what was left out, for
    each parameter
    """
    (sent,), (exact,), kept = launch(gradients_of, 1, function, 1).results[0]
    for i, (found, wanted) in enumerate(zip(sent, exact, strict=True)):
        still = "the bucket still holds the gradients themselves"
        assert not torch.equal(found, wanted), still
        signs = wanted.sign() * wanted.abs().mean()
        expect(found, signs, f"alone, gradient {i}", within=1e-6)
        keys = f"{len(kept) - kept.count(None)} of the {len(kept)} parameters as its keys"
        assert kept[i] is not None, f"after one step `rest` has {keys}"
        expect(kept[i], wanted - found, f"alone, the rest of gradient {i}", within=1e-6)


def loses_nothing(function: Callable) -> None:
    """lose nothing in four steps: what was sent, with the same bits on all ranks, and the
    last rest add up to all gradients
    """
    for world_size in (1, 2, 3):
        found = launch(gradients_of, world_size, function, 4).results
        for i, total in enumerate(map(sum, zip(*found[0][0], strict=True))):
            own = [sum(step[i] for step in exact) - kept[i] for _, exact, kept in found]
            apart = largest_difference(total, sum(own) / world_size)
            where = f"with {world_size} ranks, after 4 steps"
            away = f"{apart:.2g} away from the sum of all gradients"
            assert apart < 1e-4, f"{where}, what was sent and the rest are {away}"
        apart = largest_difference([sent for sent, *_ in found], [found[0][0]] * world_size)
        assert apart == 0, f"the gradients of {world_size} ranks differ by {apart:.2g}"


def _send_ranks(rank: int, hook: Callable) -> float:
    """The gradient that DDP leaves in a group, where each rank had ten times its number."""
    line, group = nn.Linear(1, 1, bias=False), hook.keywords["group"]
    model = DistributedDataParallel(line, process_group=group)
    model.register_comm_hook({}, lambda rest, bucket: hook(rest, bucket))
    model(torch.full((1, 1), 10.0 * rank)).sum().backward()
    return line.weight.grad.item()


def sends_to_the_group(function: Callable) -> None:
    """average over the ranks of its group only."""
    missing = "it takes no argument `group`, which is None for all ranks"
    assert "group" in inspect.signature(function).parameters, missing
    what = "the mean of ten times the rank"
    expect_in_groups(function, _send_ranks, what, even=10.0, odd=20.0)


build = Builder(
    "ddp_reducer", {signs_with_feedback: [keeps_the_rest, loses_nothing, sends_to_the_group]}
)
