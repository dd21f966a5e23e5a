"""Apparatus, not the lesson: what the ways of this chapter hold and send, and when."""

import gc
import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam
from torch.profiler import ProfilerActivity, profile

from mgpu_tutorial.fully_shard import files
from mgpu_tutorial.fully_shard.units import (
    loss_of,
    new_model,
    shard_blocks,
    share_of_batch,
    watch_units,
)
from mgpu_tutorial.lab import Table, launch, span
from mgpu_tutorial.lab.colours import MEMORY
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.record.intervals import payload, ring_passes

MODEL = 4 * 41_888  # bytes in float32
CALLS = {
    "gathered": "all_gather_single",
    "reduced": "reduce_scatter_single",
    "averaged": "all_reduce",
}


def with_ddp(model: nn.Module) -> nn.Module:
    """DDP, and its own all-reduce as a hook, where the recorder sees it."""
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, allreduce_hook)
    return wrapped


def here(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def prepared(model: nn.Module, changes: Sequence[Callable]) -> nn.Module:
    """What computes the loss when each of these has changed the model."""
    wrapped = model
    for change in changes:
        wrapped = change(model) or wrapped
    return wrapped


def measure(
    rank: int, world_size: int, changes: Sequence[Callable], name: str = "step"
) -> dict[str, int]:
    """A step of Adam when these have prepared the model: the bytes on this rank."""
    model = new_model()
    wrapped = prepared(model, changes)  # what computes the loss: the model, or DDP around it
    whole = watch_units(model)
    with span(name):
        loss_of(wrapped, share_of_batch(rank, world_size)).backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = Adam(trained)
    optimizer.step()
    moments = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return {f"as block {i} begins": nbytes for i, nbytes in enumerate(whole)} | {
        "parameters": sum(here(p).nbytes for p in model.parameters()),
        "gradients": sum(here(p.grad).nbytes for p in trained),
        "Adam": sum(here(moment).nbytes for moment in moments),
    }


def measure_each(rank: int, world_size: int, ways: Mapping) -> dict[str, dict[str, int]]:
    """The bytes on this rank in a step of each way; a span has the way's name."""
    return {name: measure(rank, world_size, way, name) for name, way in ways.items()}


def compare(ways: Mapping, *columns: str, ranks: int = 2) -> Table:
    """Launches a step of each way; bytes of rank 0, and how often the model travels."""
    rows = []
    report = launch(measure_each, ranks, ways, trace=True)
    for name, found in report.results[0].items():
        passed = ring_passes(report, name)
        found |= {column: f"{passed[op] / MODEL:.2f}" for column, op in CALLS.items()}
        rows.append([name, *(found[column] for column in columns)])
    return Table(["", *columns], rows)


def every_rank_reads(path: str) -> nn.Module:
    """Each rank builds the whole model and reads the whole file, then shards."""
    model = new_model()
    model.load_state_dict(torch.load(path))
    shard_blocks(model)
    return model


def rank_0_sends(path: str) -> nn.Module:
    """Rank 0 reads the whole file, and sends each tensor to the others."""
    whole = torch.load(path) if torch.distributed.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    model = files.empty_model(new_model)
    set_model_state_dict(model, whole, options=options)
    return model


def each_rank_maps(path: str) -> nn.Module:
    """Ours: each rank maps the file and copies its rows."""
    model = files.empty_model(new_model)
    files.read_weights(model, path)
    return model


LOADS = (every_rank_reads, rank_0_sends, each_rank_maps)


def peaks(rank: int, world_size: int, path: str) -> list[int]:
    """The most bytes that this rank has in each of LOADS, without a mapped file's."""
    most, mapped = [], Path(path).stat().st_size
    for load in LOADS:
        gc.collect()
        watched = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with watched as record, span(load.__name__):
            load(path)
        events = sorted(record.events(), key=lambda event: event.time_range.end)
        changes = [event.self_cpu_memory_usage for event in events]
        most.append(max(itertools.accumulate(c for c in changes if abs(c) != mapped)))
    return most


def loading_table() -> Table:
    """Launches four ranks that load a file in each way."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        torch.save(new_model().state_dict(), f"{folder}/weights.pt")
        report = launch(peaks, 4, f"{folder}/weights.pt", trace=True)
    for load, peak in zip(LOADS, report.results[0], strict=True):
        sent = payload(report, load.__name__) / MODEL
        rows.append([load.__name__, f"{peak / MODEL:.1f}", f"{sent:.1f}"])
    return Table(["whole models", "peak of rank 0", "sent by rank 0"], rows)


def when_whole(plan: Callable) -> Drawing:
    """Launches a step of this plan on two ranks; when rank 0 has which unit whole."""
    return units_picture(launch(watch_step, 2, plan).results[0])


def watch_step(rank: int, world_size: int, plan: Callable) -> dict[str, list[bool]]:
    """Of each unit, whether it is whole on this rank as each part of a step computes.

    The parts are the blocks and the head in forward, and again in backward; before the first
    and after the last of them nothing computes.
    """
    model = new_model()
    plan(model)
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    names: dict[str, list[str]] = {unit: [] for unit in units}  # of each unit's parameters
    for name, _ in model.named_parameters():
        around = [unit for unit in units if not unit or name.startswith(f"{unit}.")]
        names[max(around, key=len)].append(name)
    whole: dict[str, list[bool]] = {unit: [] for unit in units}

    def look(*_: object) -> None:
        for unit, own in names.items():
            there = [model.get_parameter(name) for name in own]
            whole[unit].append(not any(isinstance(p, DTensor) for p in there))

    look()
    for part in (*model.blocks, model.norm):
        part.register_forward_pre_hook(look)  # runs after fully_shard's own
        inside = getattr(part, "mlp_norm", part)  # so that its backward has begun
        inside.register_forward_hook(lambda _, inputs, x: x.register_hook(look) and None)
    loss_of(model, share_of_batch(rank, world_size)).backward()
    look()
    return whole


def units_picture(whole: Mapping[str, Sequence[bool]]) -> Drawing:
    """A bar for each unit over a step: high where its parameters are whole, low where not."""
    names = {unit: unit.replace("blocks.", "block ") or "root" for unit in whole}
    blocks = len(next(iter(whole.values()))) // 2 - 2
    parts = [*(f"block {i}" for i in range(blocks)), "head"]
    moments = ["", *parts, *parts[::-1], ""]
    left, wide, row = 58, 34, 44  # pixels
    edges = [left, *(left + 12 + wide * i for i in range(len(moments) - 1))]
    edges.append(edges[-1] + 12)
    lines, bottom, fill = [], 54 + row * len(whole), MEMORY["parameters"]
    drawing = Drawing(edges[-1] + 2, bottom + 30, "", "")
    for first, words in (1, "forward"), (1 + len(parts), "backward"):
        begin, end = edges[first] + 3, edges[first + len(parts)] - 3
        drawing.label((begin + end) / 2, 17, words, 14, weight="bold")
        drawing.line(begin, 23, end, 23, FAINT)
    for at, part in enumerate(moments):
        middle = (edges[at] + edges[at + 1]) / 2
        drawing.label(middle, 40, part.removeprefix("block "), 12)
    for number, unit in enumerate(sorted(whole, key=lambda unit: not unit)):  # the root last
        base = 46 + row * (number + 1)
        drawing.label(left - 6, base - 8, names[unit], 13, anchor="end")
        drawing.box(left, base - 7, edges[-1] - left, 7, fill, fill, 0, radius=0)
        gathers, at = [], 0
        for is_whole, together in itertools.groupby(whole[unit]):
            end = at + len([*together])
            if is_whole:
                x, y = edges[at], base - row + 14
                drawing.box(x, y, edges[end] - x, row - 14, fill, fill, 0, radius=0)
                drawing.line(x, y - 4, x, base, INK, 2.5)
                half = 1 + len(parts)
                ends = [(i, "forward" if i < half else "backward") for i in (at, end - 1)]
                ways = (f"{moments[i]} {way}" for i, way in ends)
                gathers.append(" to ".join(dict.fromkeys(ways)))
            at = end
        lines.append(f"{names[unit]} is whole in {', then in '.join(gathers)}")
    for x, high, words in (0, 20, "whole"), (84, 7, "this rank's part"):
        drawing.box(left + x, bottom + 24 - high, 18, high, fill, fill, 0, radius=0)
        drawing.label(left + x + 24, bottom + 20, words, 13, anchor="start")
    drawing.line(left + 224, bottom + 4, left + 224, bottom + 24, INK, 2.5)
    drawing.label(left + 232, bottom + 20, "gather", 13, anchor="start")
    drawing.text = "\n".join(lines)
    drawing.alt = f"When a unit is whole on a rank in a step. {'; '.join(lines)}."
    return drawing
