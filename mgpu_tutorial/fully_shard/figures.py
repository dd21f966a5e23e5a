"""Apparatus, not the lesson: what the ways of this chapter hold and send, as tables."""

import gc
import itertools
import tempfile
import time
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
from mgpu_tutorial.fully_shard.builds import gradients_of
from mgpu_tutorial.fully_shard.units import (
    loss_of,
    new_model,
    shard_blocks,
    share_of_batch,
    watch_units,
)
from mgpu_tutorial.lab import Ledger, Table, launch, span
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.intervals import payload, ring_passes
from mgpu_tutorial.sharding.figures import distances
from mgpu_tutorial.shared.models import SmallTransformer

MODEL = 4 * 41_888  # bytes in float32
Ways = Mapping[str, Sequence[Callable]]  # by name, what prepares the model, in its order
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


def measure(rank: int, world_size: int, changes: Sequence[Callable]) -> dict[str, int]:
    """A step of Adam when these have prepared the model: the bytes on this rank."""
    model = new_model()
    wrapped = prepared(model, changes)  # what computes the loss: the model, or DDP around it
    whole = watch_units(model)
    with span("step"):
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


def compare(
    ways: Mapping, *columns: str, ranks: int = 2, worker: Callable = measure
) -> Table:
    """Launches the worker for each way; bytes of rank 0, and how often the model travels."""
    rows = []
    for name, way in ways.items():
        report = launch(worker, ranks, way, trace=True)
        passed, found = ring_passes(report, "step"), report.results[0]
        found |= {column: f"{passed[op] / MODEL:.2f}" for column, op in CALLS.items()}
        rows.append([name, *(found[column] for column in columns)])
    return Table(["", *columns], rows)


def activations(rank: int, world_size: int, changes: Sequence[Callable]) -> dict[str, int]:
    """The most bytes that autograd keeps on this rank in a step, without parameters."""
    model, ledger = new_model(), Ledger()
    wrapped = prepared(model, changes)

    def look(block: nn.Module, inputs: tuple) -> None:
        there = [p for p in model.parameters() if not isinstance(p, DTensor)]
        ledger.add("parameters", there)  # which are no activations

    for block in model.blocks:
        block.register_forward_pre_hook(look)
    with ledger.saved_for_backward(), span("step"):
        loss_of(wrapped, share_of_batch(rank, world_size)).backward()
    return {"activations": ledger.saved_peak(torch.get_default_device())}


def accumulate(rank: int, world_size: int, way: Callable) -> dict[str, int]:
    """The bytes that appear on this rank until the last of four micro-batches."""
    model, seen = new_model(), []
    shard_blocks(model)
    model.register_forward_pre_hook(lambda *_: seen.append(held()), prepend=True)
    with span("step"):
        way(model, share_of_batch(rank, world_size).chunk(4))
    return {"bytes in between": seen[-1] - seen[0]}


def held() -> int:
    """The bytes of all tensors of this process, and of the gradients behind them."""
    time.sleep(0.2)  # a thread of the process group may let go a little later
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None and tensor.device.type != "meta":
                    storage = here(tensor).untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(nbytes for place, nbytes in storages.items() if place)


def step(rank: int, world_size: int, changes: Sequence[Callable]) -> dict[str, torch.Tensor]:
    """The whole gradients of a step in float64 when these have prepared the model."""
    model = new_model(torch.float64)
    wrapped = prepared(model, changes)  # has a name, for DDP's hooks go when it does
    loss_of(wrapped, share_of_batch(rank, world_size)).backward()
    return gradients_of(model)


def distances_table(ways: Ways, ranks: int) -> Table:
    """Launches each way in float64; how far any gradient is from that of one process."""
    found = {name: launch(step, ranks, changes).results for name, changes in ways.items()}
    return distances([f"{ranks} ranks, float64", "from one process"], found, step(0, 1, ()))


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


def save_once(rank: int, world_size: int, folder: str, whole: str) -> None:
    """A step of training; then shards in a folder, and one whole file."""
    model = new_model()
    shard_blocks(model)
    optimizer = Adam(model.parameters(), lr=0.01)
    loss_of(model, share_of_batch(rank, world_size)).backward()
    optimizer.step()
    files.save(model, optimizer, folder)
    files.write_whole(model, optimizer, whole)


def resume_once(rank: int, world_size: int, folder: str, whole: str) -> None:
    """The shards in a folder, as one whole file."""
    model = files.empty_model(new_model)
    optimizer = Adam(model.parameters(), lr=0.01)
    files.resume(model, optimizer, folder)
    files.write_whole(model, optimizer, whole)


def resume_table() -> Table:
    """Two ranks save after a step, three resume: how far the two whole files are apart."""
    with tempfile.TemporaryDirectory() as folder:
        shards, *whole = (f"{folder}/{name}" for name in ("shards", "a", "b"))
        launch(save_once, 2, shards, whole[0])
        launch(resume_once, 3, shards, whole[1])
        saved, resumed = map(torch.load, whole)
    moments = (file["optimizer"]["state"] for file in (saved, resumed))
    weights = largest_difference(saved["model"], resumed["model"])
    rows = [["parameters", weights], ["moments", largest_difference(*moments)]]
    return Table(["saved by 2 ranks, resumed by 3", "largest difference"], rows)


def graphs_of(rank: int, world_size: int) -> list[list]:
    """Two steps of a model of 9.6 MB; how many operations each graph of the compiler has."""
    rows, ddp = [], "compile(DDP(model))"
    ways = {ddp: None, f"{ddp}, buckets of 1 MB": 1, "fully_shard, each block compiled": None}
    for name, megabytes in ways.items():
        lengths: list[int] = []

        def count(graph, inputs, lengths=lengths) -> Callable:
            """A backend that compiles nothing, and runs each graph as it is."""
            lengths.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
            return graph.forward

        torch.compiler.reset()  # each way compiles anew
        model: nn.Module = SmallTransformer(vocabulary=64, width=256, heads=4, depth=3)
        if name.startswith(ddp):
            model = DistributedDataParallel(model, bucket_cap_mb=megabytes)
            model = torch.compile(model, backend=count)
        else:
            for block in model.blocks:
                block.compile(backend=count)
            shard_blocks(model)
        for step in range(2):
            loss_of(model, share_of_batch(0, 1, step)).backward()
        rows.append([name, len(lengths), ", ".join(map(str, lengths))])
    return rows


def compile_table() -> Table:
    """Launches one rank, for all get the same: the graphs that the compiler sees."""
    return Table(["", "graphs", "operations in each"], launch(graphs_of, 1).results[0])
