"""What the plan and the accumulation of chapter `fully_shard` must do, on real ranks."""

from collections.abc import Callable
from functools import cache

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mgpu_tutorial.fully_shard.units import (
    accumulate_gradients,
    loss_of,
    new_model,
    shard_blocks,
    share_of_batch,
)
from mgpu_tutorial.lab import span
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.run.errors import LaunchError
from mgpu_tutorial.lab.teach.build import Builder, expect, launch

Gradients = dict[str, torch.Tensor]


def gradients_of(model: nn.Module) -> Gradients:
    """The whole gradients by name; all ranks call it."""
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in gradients.items()}


def expect_gradients(results: list[Gradients], who: str) -> None:
    """Raise AssertionError unless the ranks' gradients are those of one process."""
    model = new_model(torch.float64)
    loss_of(model, share_of_batch(0, 1)).backward()
    expected = gradients_of(model)
    for rank, found in enumerate(results):
        for name, gradient in found.items():
            assert gradient is not None, (
                f"{who}: rank {rank} has no gradient of {name}. "
                "Is the reduce switched on for the last micro-batch?"
            )
            assert largest_difference(gradient, expected[name]) < 1e-12, (
                f"{who}: the gradient of {name} differs from that of one process "
                f"({gradient.norm() / expected[name].norm():.3g} times as long)"
            )


def _step(
    rank: int, world_size: int, shard: Callable
) -> tuple[list[str], list[list[int]], Gradients]:
    """Parameters that stay plain, the blocks that are whole as each begins, the gradients."""
    model = new_model(torch.float64)
    shard(model)
    plain = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    whole: list[list[int]] = []

    def look(_block: nn.Module, _inputs: tuple) -> None:
        firsts = [next(block.parameters()) for block in model.blocks]
        whole.append([i for i, p in enumerate(firsts) if not isinstance(p, DTensor)])

    for block in model.blocks:
        block.register_forward_pre_hook(look)  # runs after fully_shard's own
    with span("step"):
        loss_of(model, share_of_batch(rank, world_size)).backward()
    return plain, whole, gradients_of(model)


@cache
def _stepped(shard: Callable, world_size: int) -> Report:
    return launch(_step, world_size, shard, trace=True)


def cuts_every_parameter(shard: Callable) -> None:
    """cut every parameter, so that a rank holds its part of each between steps"""
    try:
        results = _stepped(shard, 2).results
    except LaunchError as error:
        late = " (the root comes after its blocks)" if "Invariant" in str(error) else ""
        raise AssertionError(f"{error}{late}") from None
    for plain, _, _ in results:
        some = ", ".join(plain[:2])
        assert not plain, f"{len(plain)} parameters stay whole on each rank: {some}, …"


def gathers_block_by_block(shard: Callable) -> None:
    """have one block whole at a time in forward"""
    for _, whole, _ in _stepped(shard, 2).results:
        for i, there in enumerate(whole):
            names = " and ".join(map(str, there)) or "none"
            assert there == [i], f"as block {i} begins, whole blocks: {names}, expected {i}"


def gathers_the_last_once(shard: Callable) -> None:
    """gather the root and the last block once a step, and the other two blocks twice"""
    events = events_of(_stepped(shard, 2), "step")
    calls = [event.op for event in events if event.rank == 0]
    expect(calls.count("all_gather_single"), 6, "all-gathers of a step")


def computes_as_one(shard: Callable) -> None:
    """compute the gradients of one process, on 1, 2 and 3 ranks"""
    for n in (1, 2, 3):
        results = _stepped(shard, n).results
        expect_gradients([found for _, _, found in results], f"ranks: {n}")


def _in_parts(
    rank: int, world_size: int, accumulate: Callable, parts: int
) -> tuple[Gradients, list[str]]:
    """The gradients after this rank's share in micro-batches; forwards and backwards."""
    model, order = new_model(torch.float64), []
    shard_blocks(model)

    def look(_module: nn.Module, _inputs: tuple, output: torch.Tensor) -> None:
        order.append("forward")
        output.register_hook(lambda _gradient: order.append("backward"))

    model.norm.register_forward_hook(look)
    accumulate(model, share_of_batch(rank, world_size).chunk(parts))
    return gradients_of(model), order


@cache
def _accumulated(accumulate: Callable, world_size: int, parts: int) -> Report:
    return launch(_in_parts, world_size, accumulate, parts, trace=True)


def accumulates_as_one(accumulate: Callable) -> None:
    """leave the gradients of the whole batch: on 1, 2 and 3 ranks, in 1, 2 and 4 parts"""
    for n, parts in ((1, 2), (2, 4), (3, 1)):
        results = _accumulated(accumulate, n, parts).results
        expect_gradients([found for found, _ in results], f"ranks: {n}, parts: {parts}")


def goes_back_after_each(accumulate: Callable) -> None:
    """go back after each micro-batch, so that no two have activations at once"""
    for _, order in _accumulated(accumulate, 2, 4).results:
        first = order.index("backward")
        assert first == 1, f"{first} micro-batches go forward before the first goes back"


def sends_with_the_last(accumulate: Callable) -> None:
    """reduce each of the four units once, in four parts as in one"""
    for n, parts in ((3, 1), (2, 4)):
        events = _accumulated(accumulate, n, parts).events
        calls = [event.op for event in events if event.rank == 0]
        found = calls.count("reduce_scatter_single")
        expect(found, 4, f"in {parts} parts, the calls of reduce-scatter")


build = Builder(
    "fully_shard",
    {
        shard_blocks: [
            cuts_every_parameter,
            gathers_block_by_block,
            gathers_the_last_once,
            computes_as_one,
        ],
        accumulate_gradients: [accumulates_as_one, goes_back_after_each, sends_with_the_last],
    },
)
