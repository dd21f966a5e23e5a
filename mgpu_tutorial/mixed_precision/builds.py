"""What a cast to eight bits and the end of a scaled step must do."""

from collections.abc import Callable

import torch
from torch import nn
from torch.amp import GradScaler

from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.mixed_precision import adversarial, float8, precision

INFINITE = float("inf")
EIGHT = torch.float8_e4m3fn


def scales_a_tensor_or_row(scales_of: Callable) -> None:
    """return the largest size over 448, in the shape (1,) for a tensor and (…, 1) for rows"""
    x = torch.tensor([[1.0, -448.0, 2.0], [0.0, 0.5, 224.0]])
    expect(
        scales_of(x, "tensor"), torch.tensor([1.0]), f"the scale of the tensor {x.tolist()}"
    )
    rows = torch.tensor([[1.0], [0.5]])
    expect(scales_of(x, "row"), rows, f"the scales of the rows of {x.tolist()}")
    deep = torch.stack([x, 2 * x])  # tokens of two sequences
    expect(scales_of(deep, "row"), torch.stack([rows, 2 * rows]), "the scales of 2 x 2 rows")


def scales_each_block(scales_of: Callable) -> None:
    """return a scale for each 32 numbers of a row, in the shape (…, blocks)"""
    x = torch.ones(2, 96)
    x[0, 33], x[1, 95] = -448.0 * 8, 448.0 / 4
    found = scales_of(x, "block")
    of_ones = 2.0**-8  # 256 fit into 448, and 512 don't
    expected = torch.tensor([[of_ones, 8.0, of_ones], [of_ones, of_ones, 0.25]])
    what = "2 rows of 96 ones, with -3584 in block 1 of row 0 and 112 in block 2 of row 1"
    expect(found, expected, f"{what}: the scales")


def rounds_up(scales_of: Callable) -> None:
    """round the scale of a block up to a power of two, so that nothing is above 448"""
    for largest, expected in ((449.0, 2.0), (448.0, 1.0), (440.0, 1.0), (1.0, 2.0**-8)):
        x = torch.zeros(32)
        x[7] = largest
        expect(scales_of(x, "block"), torch.tensor([expected]), f"the scale of {largest:g}")


def gives_zero_to_zeros(scales_of: Callable) -> None:
    """return 0 for what is all zeros"""
    for per, shape in (("tensor", (1,)), ("row", (2, 1)), ("block", (2, 1))):
        found = scales_of(torch.zeros(2, 32), per)
        expect(found, torch.zeros(shape), f"zeros, a scale per {per}")


def divides_by_its_scale(to_float8: Callable) -> None:
    """divide each number by its own scale and round it, in the shape of x"""
    x = torch.tensor([[17.0, 300.0], [1.0, 1.1]])
    cases = {
        "one scale of 1": (torch.ones(1), [[16.0, 288.0], [1.0, 1.125]]),
        "scales 2 and 0.25, one a row": (
            torch.tensor([[2.0], [0.25]]),
            [[8.0, 144.0], [4.0, 4.5]],
        ),
        "four scales, one a number": (
            torch.tensor([[1.0, 2.0], [0.5, 4.0]]),
            [[16.0, 144.0], [2.0, 0.28125]],
        ),
    }
    for what, (scales, expected) in cases.items():
        found = to_float8(x, scales)
        assert found.dtype == EIGHT, f"{what}: the result is {found.dtype}, expected {EIGHT}"
        expect(found.float(), torch.tensor(expected), f"{x.tolist()}, {what}")


def cuts_off(to_float8: Callable) -> None:
    """cut off at 448 what a scale leaves larger, as one of an earlier step can"""
    found = to_float8(torch.tensor([1000.0, -1000.0, 1.0]), torch.ones(1)).float()
    expect(found, torch.tensor([448.0, -448.0, 1.0]), "[1000, -1000, 1] under a scale of 1")


def keeps_zeros(to_float8: Callable) -> None:
    """return zeros for zeros, whose scale is 0"""
    x = torch.tensor([[0.0, 0.0], [4.0, 1.0]])
    found = to_float8(x, torch.tensor([[0.0], [1.0]])).float()
    expect(found, x, "rows [0, 0] and [4, 1] under scales 0 and 1")


def shows_an_infinity(to_float8: Callable) -> None:
    """return NaN for an infinity under its own scale, so that it is seen later"""
    found = to_float8(torch.tensor([INFINITE, 1.0]), torch.tensor([INFINITE])).float()
    assert found.isnan().any(), f"[inf, 1] under a scale of inf: {found.tolist()}"


def comes_back(from_float8: Callable) -> None:
    """return each number within a sixteenth of itself, for every kind of scale"""
    generator = torch.Generator().manual_seed(0)
    signs = 2.0 * torch.randint(2, (2, 3, 64), generator=generator) - 1
    x = signs * torch.rand(2, 3, 64, generator=generator).add(0.1)
    for per in ("tensor", "row", "block"):
        scales = float8.scales_of(x, per)
        back = from_float8(float8.to_float8(x, scales), scales)
        what = f"64 numbers in each of 2 x 3 rows, a scale per {per}: what comes back"
        assert back.dtype == torch.float32, f"{what} is {back.dtype}, expected float32"
        expect(tuple(back.shape), tuple(x.shape), f"{what}, its shape")
        off = ((back - x).abs() / x.abs()).max().item()
        assert off <= 1 / 16, f"{what} is off by up to {off:.0%}"


def is_exact_for_powers(from_float8: Callable) -> None:
    """return powers of two under scales that are powers of two exactly"""
    short = torch.tensor([[1.0, 2.0], [4.0, 448.0]]).to(EIGHT)
    found = from_float8(short, torch.tensor([[0.5], [4.0]]))
    expect(found, torch.tensor([[0.5, 1.0], [16.0, 1792.0]]), "rows under scales 0.5 and 4")


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


def _turned(
    rank: int, world_size: int, take: Callable, bad: tuple | None, times: int, interval: int
) -> tuple:
    """Two weights at 1, whose gradients are the ranks' numbers; the second loss pulls both.

    `bad` = (turn, rank) has an infinite loss. Returns the two weights and the scale.
    """
    nets = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for net in nets:
        nn.init.ones_(net.weight)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.25) for net in nets]
    device = nets[0].weight.device.type
    scaler = GradScaler(device, init_scale=8.0, growth_interval=interval)

    def loss_of(turn: int) -> torch.Tensor:
        loss = (rank + 1.0) * nets[turn].weight.sum()
        if turn == 1:
            loss = loss + 16 * nets[0].weight.sum()  # goes through the first network
        return loss * INFINITE if bad == (turn, rank) else loss

    turns = [(nets[i], optimizers[i], lambda i=i: loss_of(i)) for i in range(2)]
    for _ in range(times):
        take(turns, scaler)
    return *(net.weight.item() for net in nets), scaler.get_scale()


def _expect_turns(take: Callable, ranks: int, expected: list, what: str, **how) -> None:
    how = {"bad": None, "times": 1, "interval": 100} | how
    for rank, found in enumerate(launch(_turned, ranks, take, **how).results):
        said = f"{what}: on rank {rank} the two weights, which began at 1, and the scale"
        expect(list(found), expected, said, 1e-6)


def moves_both(take: Callable) -> None:
    """move each network by the mean of its own gradients over all ranks, without the scale"""
    _expect_turns(take, 1, [0.75, 0.75, 8.0], "gradients 1")
    _expect_turns(take, 3, [0.5, 0.5, 8.0], "gradients 1, 2 and 3 on the ranks")


def clears_first(take: Callable) -> None:
    """forget what the other network's loss has left in a network's gradients"""
    _expect_turns(take, 2, [0.25, 0.25, 8.0], "gradients 1 and 2, two iterations", times=2)


def skips_one(take: Callable) -> None:
    """skip on all ranks the network whose loss one rank finds infinite, and move the other"""
    for who in (0, 1):
        said = f"an infinite loss of network {{}} on rank {who}"
        _expect_turns(take, 2, [1.0, 0.625, 4.0], said.format(0), bad=(0, who))
        _expect_turns(take, 2, [0.625, 1.0, 4.0], said.format(1), bad=(1, who))


def updates_once(take: Callable) -> None:
    """count an iteration as one good step, in which the scale grows once at most"""
    _expect_turns(
        take, 1, [0.75, 0.75, 8.0], "growth every 2 iterations, one done", interval=2
    )
    said = "growth every 2 iterations, two done"
    _expect_turns(take, 1, [0.5, 0.5, 16.0], said, interval=2, times=2)


build = Builder(
    "mixed_precision",
    {
        float8.scales_of: [
            scales_a_tensor_or_row,
            scales_each_block,
            rounds_up,
            gives_zero_to_zeros,
        ],
        float8.to_float8: [divides_by_its_scale, cuts_off, keeps_zeros, shows_an_infinity],
        float8.from_float8: [comes_back, is_exact_for_powers],
        precision.finish_step: [steps_by_the_mean, clips_the_mean, skips_together],
        adversarial.take_turns: [moves_both, clears_first, skips_one, updates_once],
    },
)
