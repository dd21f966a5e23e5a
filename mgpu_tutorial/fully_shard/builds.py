"""What the plan and the accumulation of chapter `fully_shard` must do, on real ranks."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mgpu_tutorial.fully_shard.steps import accumulate_gradients
from mgpu_tutorial.fully_shard.units import loss_of, new_model, shard_blocks, share_of_batch
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.teach.build import Builder, expect
from mgpu_tutorial.sharding.builds import launch, ranks

Gradients = dict[str, torch.Tensor]


def of_one_process() -> Gradients:
    """The gradients of the whole batch in one process, without `fully_shard`."""
    model = new_model(torch.float64)
    loss_of(model, share_of_batch(0, 1)).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def expect_gradients(results: list[Gradients], who: str) -> None:
    """Raise AssertionError unless the ranks' gradients are those of one process."""
    for name, expected in of_one_process().items():
        parts = [found[name] for found in results]
        for rank, part in enumerate(parts):
            assert part is not None, (
                f"{who}: rank {rank} has no gradient of {name}. "
                "Is the reduce switched on for the last micro-batch?"
            )
        is_cut = len(parts[0]) < len(expected)
        for gradient in [torch.cat(parts)] if is_cut else parts:
            if largest_difference(gradient, expected) > 1e-12:
                times = gradient.norm() / expected.norm()
                raise AssertionError(
                    f"{who}: the gradient of {name} differs from that of one process "
                    f"({times:.3g} times as long)"
                )


def gradients_of(model: nn.Module) -> Gradients:
    """This rank's rows of the gradients, by name; plain ones are whole."""
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {n: g.to_local() if isinstance(g, DTensor) else g for n, g in gradients.items()}


# shard_blocks


def _forward(
    rank: int, world_size: int, shard: Callable
) -> tuple[list[str], list[list[int]]]:
    """Parameters that stay plain, and the blocks that are whole as each begins."""
    model = new_model(torch.float64)
    shard(model)
    plain = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    whole: list[list[int]] = []

    def look(_block: nn.Module, _inputs: tuple) -> None:
        firsts = [next(block.parameters()) for block in model.blocks]
        whole.append([i for i, p in enumerate(firsts) if not isinstance(p, DTensor)])

    for block in model.blocks:
        block.register_forward_pre_hook(look)  # runs after fully_shard's own
    loss_of(model, share_of_batch(rank, world_size))
    return plain, whole


def cuts_every_parameter(shard: Callable) -> None:
    """cut every parameter, so that a rank holds its part of each between steps"""
    try:
        results = launch(_forward, 2, shard).results
    except AssertionError as error:
        late = " (the root comes after its blocks)" if "Invariant" in str(error) else ""
        raise AssertionError(f"{error}{late}") from None
    for plain, _ in results:
        some = ", ".join(plain[:2])
        assert not plain, f"{len(plain)} parameters stay whole on each rank: {some}, …"


def gathers_block_by_block(shard: Callable) -> None:
    """have one block whole at a time in forward"""
    for _, whole in launch(_forward, 2, shard).results:
        for i, there in enumerate(whole):
            names = " and ".join(map(str, there)) or "none"
            assert there == [i], f"as block {i} begins, whole blocks: {names}, expected {i}"


def gathers_the_last_once(shard: Callable) -> None:
    """gather the root and the last block once a step, and the other two blocks twice"""
    report = launch(_step, 2, shard, trace=True)
    calls = [event.op for event in report.events if event.rank == 0]
    expect(calls.count("all_gather_single"), 6, "all-gathers of a step")


def _step(rank: int, world_size: int, shard: Callable) -> Gradients:
    model = new_model(torch.float64)
    shard(model)
    loss_of(model, share_of_batch(rank, world_size)).backward()
    return gradients_of(model)


def computes_as_one(shard: Callable) -> None:
    """compute the gradients of one process, on 1, 2 and 3 ranks"""
    for world_size in (1, 2, 3):
        found = launch(_step, world_size, shard).results
        expect_gradients(found, f"on {ranks(world_size)}")


# accumulate_gradients


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


def accumulates_as_one(accumulate: Callable) -> None:
    """leave the gradients of the whole batch: on 1, 2 and 3 ranks, in 1, 2 and 4 parts"""
    for world_size, parts in ((1, 2), (2, 1), (2, 4), (3, 2)):
        results = launch(_in_parts, world_size, accumulate, parts).results
        expect_gradients([g for g, _ in results], f"on {ranks(world_size)}, in {parts} parts")


def goes_back_after_each(accumulate: Callable) -> None:
    """go back after each micro-batch, so that no two have activations at once"""
    for _, order in launch(_in_parts, 2, accumulate, 4).results:
        first = order.index("backward")
        assert first == 1, f"{first} micro-batches go forward before the first goes back"


def sends_with_the_last(accumulate: Callable) -> None:
    """reduce each of the four units once, in four parts as in one"""
    for parts in (1, 4):
        report = launch(_in_parts, 2, accumulate, parts, trace=True)
        calls = [event.op for event in report.events if event.rank == 0]
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
