"""Apparatus, not the lesson: what the stages hold and send, when, and how long it takes."""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from mgpu_tutorial.lab import Ledger, Table, film, frame, launch, span, timeline
from mgpu_tutorial.lab.draw.drawing import FAINT, INK
from mgpu_tutorial.lab.draw.film import Film
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.intervals import events_of, milliseconds, shortest_step
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.traffic import ring_passes
from mgpu_tutorial.lab.words import bytes_text
from mgpu_tutorial.sharding import zero3
from mgpu_tutorial.sharding.blocks import Block, linked
from mgpu_tutorial.sharding.stages import STAGES, Prepare, Prepared, zero_0
from mgpu_tutorial.sharding.tower import Residual, loss_of, new_tower
from mgpu_tutorial.shared.cost_model.links import Link, ring_seconds
from mgpu_tutorial.shared.slow_link import slow_link

PARTS = ("parameters", "gradients", "optimizer state")
STAGE_NAMES = ("nothing is sharded", *(f"{'and ' * (i < 2)}{PARTS[i]}" for i in (2, 1, 0)))
MIXED = (2, 2, 12)  # the bytes of each part for one parameter


def held(parameters: float, ranks: int, stage: int, each: tuple = MIXED) -> list[float]:
    """Bytes of each of PARTS on one rank, at a stage of ZeRO."""
    sharded = (stage >= 3, stage >= 2, stage >= 1)
    pairs = zip(each, sharded, strict=True)
    return [parameters * nbytes / (ranks if is_cut else 1) for nbytes, is_cut in pairs]


def totals_table(parameters: float, ranks: list[int]) -> Table:
    """All that a rank holds in GB, in mixed precision: a column per number of ranks."""
    rows = []
    for stage, name in enumerate(STAGE_NAMES):
        totals = [f"{sum(held(parameters, n, stage)) / 1e9:.1f}" for n in ranks]
        rows.append([f"ZeRO {stage}: {name}", *totals])
    return Table(["GB on a rank", *(f"of {n:,}" for n in ranks)], rows)


# What the ranks hold and send, and whether it is right


def moments_table(*rules: Callable) -> Table:
    """How many numbers Adam keeps on each of four ranks, by the rule of ownership."""
    parameters, rows = list(new_tower().parameters()), []
    for rule in rules:
        pairs = list(zip(parameters, rule(parameters, 4), strict=True))
        kept = [2 * sum(p.numel() for p, owner in pairs if owner == r) for r in range(4)]
        rows.append([rule.__name__, *(f"{n:,}" for n in kept)])
    return Table(["moments", *(f"rank {rank}" for rank in range(4))], rows)


def train(
    rank: int, world_size: int, prepare: Prepare, dtype: torch.dtype, steps: int
) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Steps of a stage, the last in a span; the bytes then held, and the whole parameters."""
    prepared = prepare(new_tower(dtype))
    for step in range(steps):
        with span("last step" if step == steps - 1 else "step"):
            prepared.model.zero_grad()
            loss_of(prepared.model, step, rank, world_size).backward()
            prepared.step()
    return held_by(prepared), prepared.full_parameters()


def held_by(prepared: Prepared) -> list[int]:
    """The bytes of parameters, gradients and Adam's moments on this rank."""
    parameters, ledger = list(prepared.model.parameters()), Ledger()
    stepped = [p for group in prepared.optimizer.param_groups for p in group["params"]]
    states = prepared.optimizer.state.values()
    moments = [s[name] for s in states for name in ("exp_avg", "exp_avg_sq")]
    gradients = [p.grad for p in [*parameters, *stepped] if p.grad is not None]
    for part, tensors in zip(PARTS, (parameters, gradients, moments), strict=True):
        ledger.add(part, [t.to_local() if isinstance(t, DTensor) else t for t in tensors])
    return [sum(ledger[d].get(part, 0) for d in ledger.devices) for part in PARTS]


def traffic_table() -> Table:
    """Launches two ranks with each stage; how often the model travels in a step."""
    rows = []
    for stage, prepare in enumerate(STAGES):
        report = launch(train, 2, prepare, torch.float32, 2, trace=True)
        passed = sorted(ring_passes(report, "last step").items())
        models = {op: nbytes / (4 * 132_352) for op, nbytes in passed}
        calls = ", ".join(f"{times:.2f} {op}" for op, times in models.items())
        rows.append([f"ZeRO {stage}", calls, f"{sum(models.values()):.2f}"])
    return Table(["", "times the model", "in all"], rows)


def distances_table() -> Table:
    """Launches each stage on three ranks; how far any parameter is from one process."""
    what = torch.float64, 10
    alone, rows = launch(train, 1, zero_0, *what).results[0][1], []
    for stage, prepare in enumerate(STAGES):
        results = [full for _, full in launch(train, 3, prepare, *what).results]
        far = largest_difference(results, [alone] * 3)
        rows.append([f"ZeRO {stage}", "below 1e-12" if far < 1e-12 else f"{far:.0e}"])
    return Table(["3 ranks, float64", "from 1 process after 10 steps of Adam"], rows)


# Film: what a rank holds at each stage


def film_with_curve(report: Report) -> Film:
    """A film with a curve of the most bytes of any rank; each returns its own, by frame."""
    shown, most = film(report), list(map(max, zip(*report.results, strict=True)))
    for number, page in enumerate(shown.frames):
        page.height += 64
        left, right, bottom = 64, page.width - 90, page.height - 12
        across = (right - left) / (len(most) - 1)
        at = [(left + across * i, bottom - 38 * n / max(most)) for i, n in enumerate(most)]
        page.line(left, bottom, right, bottom, FAINT, 1)
        for before, after in pairwise(at):
            page.line(*before, *after, INK, 2)
        x, y = at[number]
        page.box(x - 5, y - 5, 10, 10, INK, INK, 1)
        page.label(8, bottom - 14, "bytes", 14, anchor="start")
        text = bytes_text(most[number])
        page.label(right + 10, bottom - 14, text, 14, INK, "start", "bold")
    return shown


def film_stages(rank: int, world_size: int, stages: list[int]) -> list[int]:
    """The second step of each stage: what this rank holds after backward, and at the end."""
    in_all = []
    for stage in stages:
        prepared, seen = STAGES[stage](new_tower()), {}
        for step in range(2):
            prepared.model.zero_grad()
            prepared.optimizer.zero_grad()
            loss_of(prepared.model, step, rank, world_size).backward()
            seen["as backward ends"] = held_by(prepared)
            prepared.step()
        if (after := held_by(prepared)) != seen["as backward ends"]:
            seen["after the step"] = after
        for moment, nbytes in seen.items():
            whole = [held >= 4 * 132_352 for held in nbytes]
            bricks = [range(world_size) if is_whole else [rank] for is_whole in whole]
            says = f"ZeRO {stage}, {moment}: {sum(nbytes):,} bytes on a rank."
            frame(says, dict(zip(PARTS, bricks, strict=True)))
            in_all.append(sum(nbytes))
    return in_all


def stage_film(*stages: int) -> Film:
    """Launches four ranks that take steps at each of these stages; what they hold shrinks."""
    return film_with_curve(launch(film_stages, 4, stages, trace=True))


# Stage 3: what is whole, and when


def parametrized() -> nn.Sequential:
    """The tower, with each parameter gathered when it is read."""
    tower = new_tower()
    zero3.shard_parameters(tower)
    return tower


def recomputed() -> nn.Sequential:
    """The same, with each block computed again in backward."""
    tower = parametrized()
    for block in tower:
        zero3.recompute(block)
    return tower


def in_blocks() -> nn.Sequential:
    """The tower as flat blocks, which keep no weights for backward."""
    return nn.Sequential(*map(Block, new_tower()))


def watch_gathered(rank: int, world_size: int, make: Callable) -> tuple[int, int]:
    """The bytes of gathered tensors that are alive after forward; all gathers of a step."""
    tower, gathered, original = make(), [], dist.all_gather_single

    def watch(whole: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        gathered.append((StorageWeakRef(whole.untyped_storage()), whole.nbytes))
        return original(whole, *args, **kwargs)

    dist.all_gather_single = watch
    loss = loss_of(tower, 0, rank, world_size)
    time.sleep(0.2)  # a thread of the process group may let go a little later
    alive = sum(nbytes for memory, nbytes in gathered if not memory.expired())
    loss.backward()
    return alive, len(gathered)


def gathered_table(*names: str) -> Table:
    """Launches two ranks in each of these ways: what stays whole for backward, the calls."""
    makes = {"parametrized": parametrized, "recomputed": recomputed, "flat blocks": in_blocks}
    seen = {name: launch(watch_gathered, 2, makes[name]).results[0] for name in names}
    rows = [[name, f"{alive:,}", calls] for name, (alive, calls) in seen.items()]
    return Table(["ZeRO 3", "whole bytes between forward and backward", "all-gathers"], rows)


class FilmedBlock(Block):
    """Shows after each change what of each block a rank has, and adds the bytes to `in_all`.

    `row` has all blocks.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.gradient = None  # of the whole block
        self.shard.register_post_accumulate_grad_hook(self.scattered)

    def look(self, says: str) -> None:
        mine, held, tensors = [dist.get_rank()], {}, []
        for i, block in enumerate(self.row):
            held[f"block {i}"] = mine if block.whole is None else range(2)
            own = "whole" if block.gradient is not None else []
            held[f"gradient {i}"] = own if block.shard.grad is None else "sum ½"
            tensors += block.shard, block.whole, block.gradient, block.shard.grad
        self.in_all.append(sum(t.nbytes for t in tensors if t is not None))
        frame(says, held)

    def unshard(self) -> torch.Tensor:
        whole = super().unshard()
        self.whole = whole.detach()
        caller = "forward" if torch.is_grad_enabled() else "unpack"
        self.look(f"{self.name}, {caller}: unshard, by an all-gather. Then it computes.")
        return whole

    def reshard(self, gradient: torch.Tensor | None = None) -> None:
        super().reshard()
        self.gradient = gradient
        if gradient is None:
            self.look(f"{self.name}, forward: reshard.")
        else:
            self.look(f"{self.name}, the gradient's hook: reshard. Its gradient stays.")

    def scattered(self, shard: nn.Parameter) -> None:
        self.gradient = None
        says = "the gradients' sum, and its own shard only, by a reduce-scatter."
        self.look(f"{self.name}, Gather.backward: {says}")


def film_blocks(rank: int, world_size: int) -> list[int]:
    """A forward and backward of two blocks: a frame after each change, and its bytes."""
    in_all: list[int] = []
    tower = nn.Sequential(*map(FilmedBlock, new_tower()[:2]))
    for i, block in enumerate(tower):
        block.row, block.name = list(tower), f"Block {i}"  # a plain list is no submodule
        block.in_all = in_all
    tower[0].look("Between steps each rank has its shard of every block.")
    loss_of(tower, 0, rank, world_size).backward()
    return in_all


def block_film() -> Film:
    """Launches two ranks, and shows which blocks are whole at each moment."""
    return film_with_curve(launch(film_blocks, 2, trace=True))


# Prefetching


class Busy(torch.autograd.Function):
    """Waits 20 ms in forward and 40 in backward, in spans, as if a device computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        with span(f"{name} block forward"):
            time.sleep(20e-3)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        with span(f"{ctx.name} block backward"):
            time.sleep(40e-3)
        return gradient, None


class BusyBlock(Residual):
    """A block of the tower that is busy between its two layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(Busy.apply(nn.functional.gelu(self.up(x)), self.name))


def trace_prefetch(rank: int, world_size: int, kind: type[Block]) -> None:
    """Ten steps of four busy blocks over a link of 5 ms a message and 5 MB/s."""
    blocks = [BusyBlock(64) for _ in range(4)]
    for i, block in enumerate(blocks):
        block.name = f"{i}"
    model = nn.Sequential(*linked([kind(block) for block in blocks]))
    link = Link(latency=5e-3, bandwidth=5e6)
    with slow_link(lambda nbytes: ring_seconds(nbytes, world_size, link)):
        for step in range(10):
            dist.barrier()
            with span(f"step {step}"):
                model(torch.randn(8, 64)).square().mean().backward()


def draw_prefetch(kind: type[Block], like: Report | None = None) -> tuple[Report, Plot]:
    """The shortest step of four busy blocks: what two ranks compute and send."""
    run = shortest_step(launch(trace_prefetch, 2, kind, trace=True))
    return run, timeline(run, like, during="shortest")


def prefetch_table(without: Report, ahead: Report) -> Table:
    """The steps by the formula of the text, with the transfers as they were, and measured."""
    sent = [e for e in events_of(without, "shortest") if e.kind == "collective"]
    transfer = 1e3 * statistics.median(e.end - e.begin for e in sent)
    rows = []
    for name, run, left in (("without prefetching", without, 12), ("with it", ahead, 6)):
        times = 240 + 18 * left, 240 + transfer * left, milliseconds(run, "shortest")
        rows.append([name, *(f"{time:.0f}" for time in times)])
    return Table(["ms", "18 ms a transfer", f"{transfer:.0f} ms as measured", "a step"], rows)
