"""Apparatus, not the lesson: what the stages hold and send, when, and how long it takes."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from mgpu_tutorial.lab import Table, film, frame, launch, span, timeline
from mgpu_tutorial.lab.draw.drawing import FAINT, INK
from mgpu_tutorial.lab.draw.film import Film
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.intervals import (
    events_of,
    milliseconds,
    ring_passes,
    shortest_step,
)
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.words import bytes_text
from mgpu_tutorial.sharding import zero3
from mgpu_tutorial.sharding.blocks import Block, linked
from mgpu_tutorial.sharding.stages import STAGES, Prepared, loss_of, new_tower
from mgpu_tutorial.shared.cost_model.links import Link, ring_seconds
from mgpu_tutorial.shared.slow_link import slow_link

PARTS = ("parameters", "gradients", "optimizer state")
SHARDED = ("nothing is sharded", "optimizer state", "and gradients", "and parameters")
MIXED = (2, 2, 12)  # the bytes of each part for one parameter


def held(parameters: float, ranks: int, stage: int, each: tuple = MIXED) -> list[float]:
    """Bytes of each of PARTS on one rank, at a stage of ZeRO."""
    sharded = (stage >= 3, stage >= 2, stage >= 1)
    pairs = zip(each, sharded, strict=True)
    return [parameters * nbytes / (ranks if is_cut else 1) for nbytes, is_cut in pairs]


def totals_table(parameters: float, ranks: list[int]) -> Table:
    """All that a rank holds in GB, in mixed precision: a column per number of ranks."""
    rows = []
    for stage, name in enumerate(SHARDED):
        totals = [f"{sum(held(parameters, n, stage)) / 1e9:.1f}" for n in ranks]
        rows.append([f"ZeRO {stage}: {name}", *totals])
    return Table(["GB on a rank", *(f"of {n:,}" for n in ranks)], rows)


def moments_table(rule: Callable) -> Table:
    """How many numbers Adam keeps on each of four ranks, by the rule of ownership."""
    kept, parameters = [0] * 4, list(new_tower().parameters())
    for parameter, owner in zip(parameters, rule(parameters, 4), strict=True):
        kept[owner] += 2 * parameter.numel()
    header = ["moments", *(f"rank {rank}" for rank in range(4))]
    return Table(header, [[rule.__name__, *(f"{n:,}" for n in kept)]])


# What the ranks hold and send at each stage, and whether it is right


def train(rank: int, world_size: int, dtype: torch.dtype, steps: int) -> list[tuple]:
    """Steps of each stage, in spans; the bytes held after the last, and all parameters."""
    found = []
    for stage, prepare in enumerate(STAGES):
        prepared = prepare(new_tower(dtype))
        for step in range(steps):
            with span(f"ZeRO {stage}, step {step}"):
                prepared.model.zero_grad()
                loss_of(prepared.model, step, rank, world_size).backward()
                prepared.step()
        found.append((held_by(prepared), prepared.full_parameters()))
    return found


def held_by(prepared: Prepared) -> list[int]:
    """The bytes of parameters, gradients and Adam's moments on this rank."""
    parameters, states = set(prepared.model.parameters()), prepared.optimizer.state.values()
    stepped = {p for group in prepared.optimizer.param_groups for p in group["params"]}
    gradients = [p.grad for p in parameters | stepped if p.grad is not None]
    moments = [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
    return [sum(t.nbytes for t in tensors) for tensors in (parameters, gradients, moments)]


def traffic_table() -> Table:
    """Launches two ranks; how often the model travels in a step of each stage."""
    report, rows = launch(train, 2, torch.float32, 2, trace=True), []
    for stage in range(4):
        passed = sorted(ring_passes(report, f"ZeRO {stage}, step 1").items())
        models = {op: nbytes / (4 * 132_352) for op, nbytes in passed}
        calls = ", ".join(f"{times:.2f} {op}" for op, times in models.items())
        rows.append([f"ZeRO {stage}", calls, f"{sum(models.values()):.2f}"])
    return Table(["", "times the model", "in all"], rows)


def distances_table() -> Table:
    """Launches three ranks; how far any parameter of each stage is from one process."""
    alone, rows = launch(train, 1, torch.float64, 10).results[0][0][1], []
    results = launch(train, 3, torch.float64, 10).results
    for stage, found in enumerate(zip(*results, strict=True)):
        far = largest_difference([full for _, full in found], [alone] * 3)
        rows.append([f"ZeRO {stage}", "below 1e-12" if far < 1e-12 else f"{far:.0e}"])
    return Table(["3 ranks, float64", "from 1 process after 10 steps of Adam"], rows)


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


def watch_gathered(rank: int, world_size: int, way: str) -> tuple[int, int]:
    """The bytes of gathered tensors that are alive after forward; all gathers of a step."""
    tower, gathered, original = new_tower(), [], dist.all_gather_single
    if way == "flat blocks":
        tower = nn.Sequential(*map(Block, tower))
    else:
        zero3.shard_parameters(tower)
    if way == "recomputed":
        for block in tower:
            zero3.recompute(block)

    def watch(whole: torch.Tensor, shard: torch.Tensor) -> None:
        gathered.append((StorageWeakRef(whole.untyped_storage()), whole.nbytes))
        original(whole, shard)

    dist.all_gather_single = watch
    loss = loss_of(tower, 0, rank, world_size)
    time.sleep(0.2)  # a thread of the process group may let go a little later
    alive = sum(nbytes for memory, nbytes in gathered if not memory.expired())
    loss.backward()
    return alive, len(gathered)


def gathered_table(*ways: str) -> Table:
    """Launches two ranks in each of these ways: what stays whole for backward, the calls."""
    rows = []
    for way in ways:
        alive, calls = launch(watch_gathered, 2, way).results[0]
        rows.append([way, f"{alive:,}", calls])
    return Table(["ZeRO 3", "whole bytes between forward and backward", "all-gathers"], rows)


class FilmedBlock(Block):
    """Shows after each change what a rank has of all blocks in `row`, and notes the bytes."""

    gradient = None  # of the whole block

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
    tower, in_all = nn.Sequential(*map(FilmedBlock, new_tower()[:2])), []
    for i, block in enumerate(tower):
        block.row, block.name = list(tower), f"Block {i}"  # a plain list is no submodule
        block.in_all = in_all
        block.shard.register_post_accumulate_grad_hook(block.scattered)
    block.look("Between steps each rank has its shard of every block.")
    loss_of(tower, 0, rank, world_size).backward()
    return in_all


def block_film() -> Film:
    """Launches two ranks, and shows which blocks are whole at each moment."""
    return film_with_curve(launch(film_blocks, 2, trace=True))


# Prefetching


def wait(name: str, seconds: float) -> None:
    """As if a device computed."""
    with span(name):
        time.sleep(seconds)


def busy(layer: nn.Module, inputs: tuple, output: torch.Tensor, name: str) -> None:
    """A layer that takes 20 ms in forward and 40 in backward."""
    wait(f"{name} block forward", 20e-3)
    output.register_hook(lambda _: wait(f"{name} block backward", 40e-3))


def trace_prefetch(rank: int, world_size: int, kind: type[Block]) -> None:
    """Six steps of four busy blocks over a link of 5 ms a message and 5 MB/s."""
    tower = new_tower()
    for i, block in enumerate(tower):
        block.up.register_forward_hook(partial(busy, name=f"{i}"))
    model = nn.Sequential(*linked([kind(block) for block in tower]))
    link = Link(latency=5e-3, bandwidth=5e6)
    with slow_link(lambda nbytes: ring_seconds(nbytes, world_size, link)):
        for step in range(6):
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
