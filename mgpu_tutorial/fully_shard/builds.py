"""What the plan and the blocks of chapter `fully_shard` must do, on real ranks."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from mgpu_tutorial.fully_shard.units import loss_of, new_model, shard_blocks, share_of_batch
from mgpu_tutorial.lab import span
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.run.errors import LaunchError
from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.sharding.blocks import PrefetchingBlock, linked, views_of
from mgpu_tutorial.sharding.zero import Gather

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


GATHER, SCATTER = "all_gather_single", "reduce_scatter_single"
WIDTHS = 3, 5, 7, 9, 4  # so that each layer has another number of parameters


def _layers() -> list[nn.Module]:
    torch.manual_seed(0)
    pairs = zip(WIDTHS, WIDTHS[1:], strict=False)
    return [nn.Linear(*pair).double() for pair in pairs]


def _inputs(rank: int, world_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 3, generator=generator, dtype=torch.float64).chunk(world_size)[rank]


class _Late:
    """The request of a gather whose numbers are not there before it is waited for."""

    def __init__(self, carry: Callable, arrived: Callable) -> None:
        self.carry, self.arrived = carry, arrived

    def wait(self, *_: Any) -> None:
        if self.carry:
            self.carry()
            self.arrived()
            self.carry = None


@contextmanager
def _late_gathers(events: list[tuple[str, int]]) -> Iterator[list[StorageWeakRef]]:
    """Each gather arrives when it is waited for; notes both, and the scatters, by block.

    Yields the memories that were gathered into.
    """
    calls = {name: getattr(dist, name) for name in (GATHER, SCATTER)}
    counts = [a * b + b for a, b in zip(WIDTHS, WIDTHS[1:], strict=False)]
    ranks, memories = dist.get_world_size(), []
    lengths = [count + -count % ranks for count in counts]

    def gather(
        whole: torch.Tensor,
        part: torch.Tensor,
        *rest: Any,
        async_op: bool = False,
        **more: Any,
    ) -> _Late:
        part = part.clone()  # as it is now
        memories.append(StorageWeakRef(whole.untyped_storage()))
        whole.fill_(float("nan"))
        number = lengths.index(len(whole)) if len(whole) in lengths else -1
        events.append(("gather", number))
        late = _Late(
            lambda: calls[GATHER](whole, part, *rest, **more),
            lambda: events.append(("wait", number)),
        )
        return late if async_op else late.wait()

    def scatter(part: torch.Tensor, whole: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if len(whole) in lengths:
            events.append(("scatter", lengths.index(len(whole))))
        return calls[SCATTER](part, whole, *rest, **more)

    dist.all_gather_single, dist.reduce_scatter_single = gather, scatter
    try:
        yield memories
    finally:
        for name, call in calls.items():
            setattr(dist, name, call)


def _alive(memories: Sequence[StorageWeakRef]) -> int:
    """How many stay; a thread of the process group may let go a little later."""
    limit = time.monotonic() + 0.5
    while not all(memory.expired() for memory in memories) and time.monotonic() < limit:
        time.sleep(0.01)
    return sum(not memory.expired() for memory in memories)


class _Ahead(NamedTuple):
    """A step of linked blocks: what came after what, what stays, and what was computed."""

    forward: list[tuple[str, int]]
    backward: list[tuple[str, int]]
    alive: tuple[int, int]  # gathered tensors after forward, and after backward
    output: torch.Tensor
    gradients: list[torch.Tensor]


def _step_ahead(
    rank: int, world_size: int, block: type, depth: int, in_pairs: bool, is_stale: bool
) -> _Ahead:
    """A step on this rank's part; `is_stale`: the shards change when a gather has begun."""
    pair = [dist.new_group([0, 2]), dist.new_group([1, 3])] if in_pairs else None
    group = [pair[rank % 2]] if pair else []
    rank, world_size = (rank // 2, 2) if pair else (rank, world_size)
    layers = _layers()
    model = linked([block(layer, *group) for layer in layers], depth)
    events: list[tuple[str, int]] = []
    for i, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, i=i: events.append(("compute", i)))
    with _late_gathers(events) as memories:
        if is_stale:
            with torch.no_grad():
                model[0](_inputs(rank, world_size))  # and the next one is on its way
                for each in model:
                    each.shard *= 2
        events.clear()
        output = model(_inputs(rank, world_size))
        forward = list(events)
        events.clear()
        after_forward = _alive(memories)
        output.square().mean().backward()
        after_backward = _alive(memories)
    gradients = []
    for each in model:
        found = views_of(Gather.apply(each.shard.grad, *group), each.shapes)
        gradients += found.values()
    alive = after_forward, after_backward
    return _Ahead(forward, list(events), alive, output.detach(), gradients)


@cache
def _ahead(
    block: type, n: int, depth: int = 1, in_pairs: bool = False, is_stale: bool = False
) -> list[_Ahead]:
    return launch(_step_ahead, n, block, depth, in_pairs, is_stale).results


def _as_one_process(results: Sequence[_Ahead], where: str, factor: int = 1) -> None:
    """Raise AssertionError unless these ranks together are as one process."""
    model = nn.Sequential(*_layers())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= factor
    outputs = model(_inputs(0, 1))
    outputs.square().mean().backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    parts = outputs.detach().chunk(len(results))
    for rank, (step, part) in enumerate(zip(results, parts, strict=True)):
        who = f"{where}, rank {rank}: "
        for phase, events in (("forward", step.forward), ("backward", step.backward)):
            sent = [i for what, i in events if what == "gather"]
            come = [i for what, i in events if what == "wait"]
            for i in sent:
                assert i in come, f"{who}in {phase} nobody waits for block {i}'s gather"
        expect(step.output, part, who + "the output", 1e-12)
        expect(step.gradients, wanted, who + "the gradients", 1e-12)


def goes_ahead_like_one(block: type) -> None:
    """give the output and the gradients of one process, on 1, 2 and 3 ranks"""
    for n in (1, 2, 3):
        _as_one_process(_ahead(block, n), f"{n} ranks")


def _begun(events: list[tuple[str, int]], until: tuple[str, int], what: str) -> list[int]:
    """The blocks of which this has happened before."""
    end = events.index(until) if until in events else len(events)
    return [i for name, i in events[:end] if name == what]


def _on_the_way(block: type, phase: str) -> None:
    last = len(WIDTHS) - 2
    for depth in (1, 2):
        events = getattr(_ahead(block, 2, depth)[0], phase)
        order = [i for what, i in events if what == "gather"]
        for i in range(last, -1, -1) if phase == "backward" else range(last + 1):
            if phase == "forward":
                moment, wanted = ("compute", i), [*range(min(last, i + depth) + 1)]
                said = f"as block {i} begins to compute"
            else:
                moment, wanted = ("scatter", i), [*range(last, max(0, i - depth) - 1, -1)]
                said = f"as block {i} has its gradient"
            begun = _begun(events, moment, "gather")
            pair = [", ".join(map(str, blocks)) or "none" for blocks in (begun, wanted)]
            assert begun == wanted, (
                f"depth {depth}, {said} the gathers so far are of blocks {pair[0]}, and not "
                f"of {pair[1]}"
            )
            here = _begun(events, moment, "wait")
            early = [j for j in here if (j > i if phase == "forward" else j < i)]
            assert not early, f"depth {depth}, {said} it has waited for block {early[0]}"
        expect(len(order), last + 1, f"depth {depth}: all-gathers in {phase}")


def is_on_its_way_in_forward(block: type) -> None:
    """have the next block on its way while one computes, and with depth 2 the next two"""
    _on_the_way(block, "forward")


def is_on_its_way_in_backward(block: type) -> None:
    """do the same in backward, with the blocks before it"""
    _on_the_way(block, "backward")


def keeps_no_block(block: type) -> None:
    """keep no gathered memory after forward, and none after backward"""
    for depth in (1, 2):
        for rank, step in enumerate(_ahead(block, 2, depth)):
            for phase, alive in zip(("forward", "backward"), step.alive, strict=True):
                where = f"depth {depth}, rank {rank}, after {phase}"
                assert not alive, f"{where}: {alive} gathered tensors are still there"


def gathers_again_after_a_step(block: type) -> None:
    """gather again what was on its way when a step changed the shards"""
    _as_one_process(_ahead(block, 2, is_stale=True), "after a step", factor=2)


def goes_ahead_in_a_group(block: type) -> None:
    """work in a group: ranks 0 and 2 share one model, ranks 1 and 3 another one"""
    results = _ahead(block, 4, in_pairs=True)
    for first in (0, 1):
        _as_one_process(results[first::2], f"ranks {first} and {first + 2}")


build = Builder(
    "fully_shard",
    {
        shard_blocks: [
            cuts_every_parameter,
            gathers_block_by_block,
            gathers_the_last_once,
            computes_as_one,
        ],
        PrefetchingBlock: [
            goes_ahead_like_one,
            is_on_its_way_in_forward,
            is_on_its_way_in_backward,
            keeps_no_block,
            gathers_again_after_a_step,
            goes_ahead_in_a_group,
        ],
    },
)
