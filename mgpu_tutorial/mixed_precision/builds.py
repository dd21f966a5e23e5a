"""What the end of a scaled step must do, and how ranks agree on an overflow."""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler

from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.mixed_precision import precision

INFINITE = float("inf")


def _ended(
    rank: int, world_size: int, finish: Callable, inputs: list[list[float]]
) -> tuple[torch.Tensor, float]:
    """The weights after one step from zero, whose gradient is the input of this rank."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    scaler = GradScaler(model.weight.device.type, init_scale=8.0)
    scaler.scale(model(torch.tensor(inputs[rank])).sum()).backward()
    finish(model, torch.optim.SGD(model.parameters(), lr=1.0), scaler)
    return model.weight.detach()[0], scaler.get_scale()


def _expect(
    finish: Callable, inputs: list[list[float]], weights: list[float], scale: float = 8.0
) -> None:
    for rank, found in enumerate(launch(_ended, len(inputs), finish, inputs).results):
        what = f"gradients {inputs}: on rank {rank} the"
        expect(found[0], torch.tensor(weights), f"{what} weights after a step from 0", 1e-4)
        expect(found[1], scale, f"{what} scale, which began at 8")


def steps_by_the_mean(finish: Callable) -> None:
    """move every rank by the mean of all gradients, without their scale"""
    # so short that with their scale of 8 they are not clipped either
    _expect(finish, [[0.03, 0.0, 0.02]], [-0.03, 0.0, -0.02])
    _expect(finish, [[0.03, 0.0, 0.02], [0.0, 0.04, 0.02]], [-0.015, -0.02, -0.02])


def clips_the_mean(finish: Callable) -> None:
    """clip the mean of the true gradients to the norm 1"""
    _expect(finish, [[30.0, 40.0, 0.0]], [-0.6, -0.8, 0.0])
    _expect(finish, [[60.0, 0.0, 0.0], [0.0, 80.0, 0.0]], [-0.6, -0.8, 0.0])


def skips_together(finish: Callable) -> None:
    """skip the step on all ranks, and halve the scale, where one rank meets an infinity"""
    for who in (0, 1, 2):
        inputs = [[0.3, INFINITE if rank == who else 0.0, 0.0] for rank in range(3)]
        _expect(finish, inputs, [0.0, 0.0, 0.0], scale=4.0)


def _asked(rank: int, world_size: int, ask: Callable, numbers: list[float | None]) -> bool:
    """What `ask` says of gradients with this rank's number; with None it has no gradients."""
    number = numbers[rank]
    return ask([] if number is None else [torch.ones(2, 3), torch.tensor([1.0, number])])


def says_the_same(ask: Callable) -> None:
    """be True where all gradients of all ranks are finite; else False on every rank, even on
    one without gradients
    """
    every = [[0.5], [0.5, 0.5], [0.5, None, 0.5], [INFINITE, -INFINITE]]
    for number in (INFINITE, -INFINITE, float("nan")):
        every += [number], [0.5, number, None]
    for numbers in every:
        expected = all(n is None or math.isfinite(n) for n in numbers)
        for rank, answer in enumerate(launch(_asked, len(numbers), ask, numbers).results):
            what = f"ranks with {numbers} in a gradient: what rank {rank} says"
            expect(answer, expected, what)


def _of_unused(rank: int, world_size: int, ask: Callable, number: float) -> bool:
    """What `ask` says where rank 1 has not used a layer, so that its gradient is None."""
    return ask([torch.tensor([number]), None if rank == 1 else torch.ones(2)])


def takes_none(ask: Callable) -> None:
    """accept None for a gradient that is missing, such as that of a frozen or unused layer"""
    for number, expected in ((0.5, True), (INFINITE, False)):
        found = launch(_of_unused, 2, ask, number).results
        expect(found, [expected] * 2, f"{number} and a None on rank 1: what the ranks say")


def sends_one_number(ask: Callable) -> None:
    """send one number in one call, however many gradients there are"""
    report = launch(_asked, 2, ask, [0.5, INFINITE], trace=True)
    sizes = [e.nbytes for e in report.events if e.rank == 0 and e.kind == "collective"]
    assert len(sizes) == 1, f"rank 0 made {len(sizes)} calls"
    assert sizes[0] <= 8, f"rank 0 sent {sizes[0]} bytes"


def _in_pairs(rank: int, world_size: int, ask: Callable) -> bool:
    """Of four ranks 0 and 2 ask each other, and so do 1 and 3; rank 3 has an overflow."""
    groups = [dist.new_group([first, first + 2]) for first in (0, 1)]
    number = INFINITE if rank == 3 else 0.5
    return ask([torch.tensor([number])], group=groups[rank % 2])


def asks_a_group(ask: Callable) -> None:
    """ask the ranks of `group` alone, if one is given"""
    found = launch(_in_pairs, 4, ask).results
    what = "groups of ranks 0 and 2, 1 and 3, an overflow on rank 3: what rank {} says"
    for rank, answer in enumerate(found):
        expect(answer, rank in (0, 2), what.format(rank))


ASK = [says_the_same, takes_none, sends_one_number, asks_a_group]
build = Builder(
    "mixed_precision",
    {
        precision.finish_step: [steps_by_the_mean, clips_the_mean, skips_together],
        precision.is_finite_everywhere: ASK,
    },
)
