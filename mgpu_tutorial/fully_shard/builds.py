"""What the plan of chapter `fully_shard` must do, on real ranks."""

from collections.abc import Callable
from functools import cache

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from mgpu_tutorial.fully_shard.units import loss_of, new_model, shard_blocks, share_of_batch
from mgpu_tutorial.lab import span
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.run.errors import LaunchError
from mgpu_tutorial.lab.teach.build import Builder, expect, launch

Gradients = dict[str, torch.Tensor]


def gradients_of(model: nn.Module) -> Gradients:
    """The whole gradients by name; all ranks call it."""
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


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
def _stepped(shard: Callable) -> Report:
    return launch(_step, 2, shard, trace=True)


def cuts_every_parameter(shard: Callable) -> None:
    """cut every parameter, so that a rank holds its part of each between steps"""
    try:
        results = _stepped(shard).results
    except LaunchError as error:
        late = " (the root comes after its blocks)" if "Invariant" in str(error) else ""
        raise AssertionError(f"{error}{late}") from None
    for plain, _, _ in results:
        some = ", ".join(plain[:2])
        assert not plain, f"{len(plain)} parameters stay whole on each rank: {some}, …"


def gathers_block_by_block(shard: Callable) -> None:
    """have one block whole at a time in forward"""
    for _, whole, _ in _stepped(shard).results:
        for i, there in enumerate(whole):
            names = " and ".join(map(str, there)) or "none"
            assert there == [i], f"as block {i} begins, whole blocks: {names}, expected {i}"


def gathers_the_last_once(shard: Callable) -> None:
    """gather the root and the last block once a step, and the other two blocks twice"""
    events = events_of(_stepped(shard), "step")
    calls = [event.op for event in events if event.rank == 0]
    expect(calls.count("all_gather_single"), 6, "all-gathers of a step")


def computes_as_one(shard: Callable) -> None:
    """compute the gradients of one process"""
    model = new_model(torch.float64)
    loss_of(model, share_of_batch(0, 1)).backward()
    results = [gradients for _, _, gradients in _stepped(shard).results]
    far = largest_difference(results, [gradients_of(model)] * 2)
    assert far < 1e-12, f"a gradient is {far:.2g} away from that of one process"


BEHAVIOURS = [
    cuts_every_parameter,
    gathers_block_by_block,
    gathers_the_last_once,
    computes_as_one,
]
build = Builder("fully_shard", {shard_blocks: BEHAVIOURS})
