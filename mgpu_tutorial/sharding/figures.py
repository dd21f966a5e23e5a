"""Apparatus, not the lesson: what the stages hold and send, when, and how long it takes."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from mgpu_tutorial.lab import Ledger, Table, film, frame, launch, slow_link, span
from mgpu_tutorial.lab.colours import COLOURS
from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.film import Film
from mgpu_tutorial.lab.draw.memory_bars import LOOKS
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.intervals import events_of, milliseconds, shortest_step
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.traffic import ring_passes
from mgpu_tutorial.sharding.arithmetic import FLOAT32, STAGE_NAMES, held
from mgpu_tutorial.sharding.blocks import Block, linked
from mgpu_tutorial.sharding.stages import STAGES, Prepare, Prepared, zero_0
from mgpu_tutorial.sharding.tower import loss_of, new_tower
from mgpu_tutorial.sharding.zero3 import shard_parameters
from mgpu_tutorial.shared.cost_model.links import Link, ring_seconds

PARTS = ("parameters", "gradients", "optimizer state")
NAMES = [f"ZeRO {stage}: {name}" for stage, name in STAGE_NAMES.items()]


def totals_table(parameters: float, ranks: list[int]) -> Table:
    """All that a rank holds in GB, in mixed precision: a column per number of ranks."""
    totals = [[sum(held(parameters, n, s)) / 1e9 for n in ranks] for s in STAGE_NAMES]
    rows = [
        [name, *(f"{x:.1f}" for x in row)] for name, row in zip(NAMES, totals, strict=True)
    ]
    return Table(["GB on a rank", *(f"of {n}" for n in ranks)], rows)


def zero_bars(billions: float, ranks: int) -> Plot:
    """What one of the ranks holds in GB, a bar per stage; a line at 80 GB."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.9), layout="constrained")
    axes = figure.subplots()
    totals, looks = [], [(part, LOOKS[part]) for part in PARTS]
    for stage in STAGE_NAMES:
        parts = [nbytes / 1e9 for nbytes in held(billions * 1e9, ranks, stage)]
        for i, (part, (colour, hatch)) in enumerate(looks):
            style = {"facecolor": colour, "hatch": hatch, "edgecolor": INK}
            label = {} if stage else {"label": part}
            axes.barh(stage, parts[i], 0.7, sum(parts[:i]), **style, **label)
        totals.append(f"{sum(parts):.1f} GB")
        axes.text(sum(parts), stage, f" {totals[-1]}", va="center", fontsize=11)
    axes.axvline(80, color=INK, linestyle="--")
    axes.set_yticks(range(4), NAMES)
    axes.set(ylim=(3.6, -0.6), xlabel=f"GB on one of {ranks:,} ranks; the line is at 80 GB")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper left", ncols=3, frameon=False)
    return Plot(figure, f"GB on one of {ranks} ranks, ZeRO 0 to 3: {', '.join(totals)}")


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
    return [sum(ledger[device][part] for device in ledger.devices) for part in PARTS]


def state_table(*stages: int) -> Table:
    """Launches four ranks at each of these stages; what each holds, and what it should."""
    rows = []
    for stage in stages:
        results = launch(train, 4, STAGES[stage], torch.float32, 1).results
        first, *others = [nbytes for nbytes, _ in results]
        assert all(other == first for other in others)
        formula = int(sum(held(132_352, 4, stage, FLOAT32)))
        rows.append([f"ZeRO {stage}", *first, sum(first), formula])
    return Table(["bytes", *PARTS, "counted", "by formula"], rows)


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


# Stage 3: what is whole, and when


class Recomputed(nn.Sequential):
    """Keeps nothing of a layer but its input, and computes the layer again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def watch_gathered(rank: int, world_size: int, kind: str) -> tuple[int, int]:
    """The bytes of gathered tensors that are alive after forward; all gathers of a step."""
    tower, gathered, original = new_tower(), [], dist.all_gather_single

    def watch(whole: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        gathered.append((StorageWeakRef(whole.untyped_storage()), whole.nbytes))
        return original(whole, *args, **kwargs)

    if kind == "one flat tensor a block":
        tower = nn.Sequential(*map(Block, tower))
    else:
        shard_parameters(tower)
    dist.all_gather_single = watch
    loss = loss_of(Recomputed(*tower) if "again" in kind else tower, 0, rank, world_size)
    time.sleep(0.2)  # a thread of the process group may let go a little later
    alive = sum(nbytes for memory, nbytes in gathered if not memory.expired())
    loss.backward()
    return alive, len(gathered)


def gathered_table(*kinds: str) -> Table:
    """Launches forms of stage 3 on two ranks: what autograd keeps alive, and the calls."""
    seen = [launch(watch_gathered, 2, kind).results[0] for kind in kinds]
    rows = [[kind, f"{alive:,}", n] for kind, (alive, n) in zip(kinds, seen, strict=True)]
    return Table(["ZeRO 3", "whole bytes between forward and backward", "all-gathers"], rows)


class Filmed(Block):
    """Shows after each change which shards of each block a rank has; `row` has all blocks."""

    def look(self, says: str) -> None:
        held = {
            f"block {i}": [dist.get_rank()] if block.whole is None else range(2)
            for i, block in enumerate(self.row)
        }
        tensors = [t for b in self.row for t in (b.shard, b.whole) if t is not None]
        frame(says, held, nbytes=sum(t.nbytes for t in tensors))

    def unshard(self) -> torch.Tensor:
        whole = super().unshard()
        self.whole = whole.detach()
        who = "Forward reaches" if torch.is_grad_enabled() else "Backward needs"
        self.look(f"{who} block {self.row.index(self)}: unshard, by an all-gather.")
        return whole

    def reshard(self, gradient: torch.Tensor | None = None) -> None:
        super().reshard()
        done = "is computed" if gradient is None else "has its gradient"
        self.look(f"Block {self.row.index(self)} {done}: reshard.")


def film_blocks(rank: int, world_size: int) -> None:
    """One forward and backward of three blocks, a frame after each change."""
    tower = nn.Sequential(*map(Filmed, new_tower()[:3]))
    for block in tower:
        block.row = list(tower)  # a plain list is no submodule
    tower[0].look("Between steps each rank has its shard of every block.")
    loss_of(tower, 0, rank, world_size).backward()


def block_film() -> Film:
    """Launches two ranks, and shows which blocks are whole at each moment."""
    return film(launch(film_blocks, 2, trace=True))


# Prefetching


class Busy(torch.autograd.Function):
    """Waits in forward and twice as long in backward, in spans, as if a device computed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: int, seconds: float) -> torch.Tensor:
        ctx.name, ctx.seconds = name, seconds
        with span(f"forward {name}"):
            time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        with span(f"backward {ctx.name}"):
            time.sleep(2 * ctx.seconds)
        return gradient, None, None


class SlowBlock(nn.Module):
    """Two layers of 257 KiB together; between them 10 ms in forward and 20 in backward."""

    def __init__(self, name: int) -> None:
        super().__init__()
        self.up, self.down, self.name = nn.Linear(256, 128), nn.Linear(128, 256), name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(Busy.apply(self.up(x), self.name, 10e-3))


def trace_prefetch(rank: int, world_size: int, kind: type[Block]) -> None:
    """Five steps of six slow blocks over a link of 2.5 ms a message and 20 MB/s."""
    model = nn.Sequential(*linked([kind(SlowBlock(i)) for i in range(6)]))
    link = Link(latency=2.5e-3, bandwidth=20e6)
    with slow_link(lambda nbytes: ring_seconds(nbytes, world_size, link)):
        for step in range(5):
            dist.barrier()
            with span(f"step {step}"):
                model(torch.randn(8, 256)).square().mean().backward()


def draw_prefetch(kind: type[Block], like: Report | None = None) -> tuple[Report, Plot]:
    """The shortest step of six slow blocks: what rank 0 computes, and what its link does."""
    from matplotlib.figure import Figure

    run = shortest_step(launch(trace_prefetch, 2, kind, trace=True))
    figure = Figure(figsize=(9, 2.2), layout="constrained")
    axes = figure.subplots()
    numbers = {"all_gather_single": [*range(6), *range(5, -1, -1)]}
    numbers["reduce_scatter_single"] = [*range(5, -1, -1)]  # the order of the blocks
    looks = {"forward": "", "backward": "\\\\", "all_gather_single": "//"}
    events = [e for e in events_of(run, "shortest") if e.rank == 0 and e.kind != "wait"]
    for event in events:
        kind, _, number = (event.note or event.op).partition(" ")
        row, colour = kind in numbers, [*looks, "reduce_scatter_single"].index(kind)
        times = [1e3 * (t - events[0].begin) for t in (event.begin, event.done or event.end)]
        style = {"facecolor": COLOURS[colour], "hatch": looks.get(kind, ".."), "alpha": 0.75}
        axes.barh(row, times[1] - times[0], 0.7, times[0], label=kind, ec="white", **style)
        box = {"facecolor": "white", "lw": 0, "pad": 1}
        number = number or numbers[kind].pop(0)
        axes.text(sum(times) / 2, row, number, ha="center", va="center", bbox=box)
    axes.set_yticks([0, 1], ["computes", "link"])
    wide = max(milliseconds(report, "shortest") for report in (run, like or run))
    axes.set(xlim=(0, 1.02 * wide), ylim=(1.5, -0.5), xlabel="milliseconds (measured)")
    axes.spines[["top", "right"]].set_visible(False)
    names, handles = axes.get_legend_handles_labels()[::-1]
    legend = dict(zip(names, handles, strict=True))
    figure.legend(legend.values(), legend, loc="outside upper left", ncols=4, frameon=False)
    return run, Plot(figure, f"rank 0 and its link over a step: {', '.join(legend)}")
