"""Apparatus, not the lesson: what the ways of this chapter hold and send, as tables."""

import gc
import itertools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
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
