"""Apparatus, not the lesson: what the ways of this chapter hold and send, as tables."""

import gc
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
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
from mgpu_tutorial.lab import Ledger, Table, launch, span
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.intervals import payload, ring_passes
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.shared.models import SmallTransformer

MODEL = 4 * 41_888  # bytes in float32
Ways = Mapping[str, Sequence[Callable]]  # by name, what prepares the model, in its order
CALLS = {"gathered": "all_gather_single", "reduced": "reduce_scatter_single"}
CALLS |= {"averaged": "all_reduce"}


def with_ddp(model: nn.Module) -> nn.Module:
    """DDP, and its own all-reduce as a hook, where the recorder sees it."""
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, allreduce_hook)
    return wrapped


def here(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def measure(rank: int, world_size: int, ways: Ways) -> dict[str, dict[str, int]]:
    """A step of Adam with each way to prepare the model: the bytes on this rank."""
    found = {}
    for name, prepare in ways.items():
        model = wrapped = new_model()
        for change in prepare:
            wrapped = change(model) or model
        whole, ledger = watch_units(model), Ledger()

        def look(_: nn.Module, __: tuple, model=model, ledger=ledger) -> None:
            there = [p for p in model.parameters() if not isinstance(p, DTensor)]
            ledger.add("parameters", there)  # which are no activations

        for block in model.blocks:
            block.register_forward_pre_hook(look)
        with ledger.saved_for_backward(), span(name):
            loss_of(wrapped, share_of_batch(rank, world_size)).backward()
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = Adam(trained)
        optimizer.step()
        moments = [
            s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")
        ]
        found[name] = {f"as block {i} begins": nbytes for i, nbytes in enumerate(whole)} | {
            "activations": ledger.saved_peak(torch.get_default_device()),
            "parameters": sum(here(p).nbytes for p in model.parameters()),
            "gradients": sum(here(p.grad).nbytes for p in trained),
            "Adam": sum(here(moment).nbytes for moment in moments),
        }
    return found


def table_of(report: Report, title: str, columns: Sequence[str]) -> Table:
    """A row for each way: bytes of rank 0, and how often the model passes a ring."""
    rows = []
    for name, found in report.results[0].items():
        passed = ring_passes(report, name)
        found |= {column: f"{passed[op] / MODEL:.2f}" for column, op in CALLS.items()}
        rows.append([name, *(found[column] for column in columns)])
    return Table([title, *columns], rows)


def compare(ways: Ways, *columns: str, ranks: int = 2) -> Table:
    """Launches each way to prepare the model; bytes of rank 0, and traffic in models."""
    return table_of(launch(measure, ranks, ways, trace=True), "", columns)


def each_is_sent(model: nn.Module, micro_batches: Sequence[torch.Tensor]) -> None:
    """The loop of one process, with nothing switched off."""
    for tokens in micro_batches:
        (loss_of(model, tokens) / len(micro_batches)).backward()


def accumulate(rank: int, world_size: int, ways: Sequence[Callable]) -> dict[str, dict]:
    """The bytes that appear on this rank until the last of four micro-batches."""
    found: dict[str, dict] = {}
    for way in ways:
        model, seen = new_model(), []
        shard_blocks(model)
        micro_batches = share_of_batch(rank, world_size).chunk(4)
        model.register_forward_pre_hook(lambda *_, s=seen: s.append(held()), prepend=True)
        with span(way.__name__):
            way(model, micro_batches)
        found[way.__name__] = {"bytes in between": seen[-1] - seen[0]}
    return found


def held() -> int:
    """The bytes of all tensors of this process, and of the gradients behind them."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None and tensor.device.type != "meta":
                    storage = here(tensor).untyped_storage()
                    storages[storage.data_ptr()] = storage.nbytes()
    return sum(nbytes for place, nbytes in storages.items() if place)


def accumulation_table(way: Callable) -> Table:
    """Launches two ranks with four micro-batches; what is sent, and what stays between."""
    report = launch(accumulate, 2, [each_is_sent, way], trace=True)
    columns = "gathered", "reduced", "bytes in between"
    return table_of(report, "four micro-batches", columns)


def furthest(rank: int, world_size: int, ways: Ways) -> list[float]:
    """How far any gradient of each way is from that of one process, in float64."""
    alone, distances = new_model(torch.float64), []
    loss_of(alone, share_of_batch(0, 1)).backward()
    for prepare in ways.values():
        model = wrapped = new_model(torch.float64)
        for change in prepare:
            wrapped = change(model) or model
        loss_of(wrapped, share_of_batch(rank, world_size)).backward()
        found = [p.grad for p in model.parameters()]
        found = [g.full_tensor() if isinstance(g, DTensor) else g for g in found]
        distances.append(largest_difference(found, [p.grad for p in alone.parameters()]))
    return distances


def distances_table(ways: Ways, ranks: int) -> Table:
    """Launches each way in float64, and compares the gradients of all ranks."""
    rows = []
    results = launch(furthest, ranks, ways).results
    for way, far in zip(ways, map(max, zip(*results, strict=True)), strict=True):
        rows.append([way, "below 1e-12" if far < 1e-12 else f"{far:.0e}"])
    return Table([f"{ranks} ranks, float64", "from one process"], rows)


def muon_ways(rank: int, world_size: int, move: Callable) -> list[list]:
    """How far `move` moves this rank's rows from where one process does, and its calls."""
    alone, model, rows = new_model(), new_model(), []
    shard_blocks(model)
    loss_of(alone, share_of_batch(0, 1)).backward()
    loss_of(model, share_of_batch(rank, world_size)).backward()
    whole, gradient = (m.blocks[0].attention.query.weight.grad for m in (alone, model))
    mine = move(whole).chunk(world_size)[rank]
    given_by = {
        "gradient.to_local()": gradient.to_local,
        "gradient": lambda: gradient,
        "gradient.full_tensor()": gradient.full_tensor,
    }
    for name, given in given_by.items():
        with CommDebugMode() as calls:
            moved = here(move(given()))
        if len(moved) > len(mine):
            moved = moved.chunk(world_size)[rank]
        far = float((moved - mine).norm() / mine.norm())
        rows.append([f"moved_by_muon({name})", f"{far:.1f}", calls.get_total_counts()])
    return rows


def muon_table(move: Callable) -> Table:
    """Launches two ranks that step by Muon: on a rank's rows, on a DTensor, on all rows."""
    rows = launch(muon_ways, 2, move).results[0]
    return Table(["", "off by", "calls of collectives"], rows)


# Files


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
    model = files.empty_model()
    set_model_state_dict(model, whole, options=options)
    return model


def each_rank_maps(path: str) -> nn.Module:
    """Ours: each rank maps the file and copies its rows."""
    model = files.empty_model()
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
        kept = [change for change in changes if abs(change) != mapped]
        most.append(max(itertools.accumulate(kept)))
    return most


@contextmanager
def ordinary_file() -> Iterator[str]:
    """The path of a file with the model's weights, as torch.save writes them."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(new_model().state_dict(), f"{folder}/weights.pt")
        yield f"{folder}/weights.pt"


def loading_table() -> Table:
    """Launches four ranks that load a file in each way."""
    rows = []
    with ordinary_file() as path:
        report = launch(peaks, 4, path, trace=True)
    for load, peak in zip(LOADS, report.results[0], strict=True):
        sent = payload(report, load.__name__) / MODEL
        rows.append([load.__name__, f"{peak / MODEL:.1f}", f"{sent:.1f}"])
    return Table(["whole models", "peak of rank 0", "sent by rank 0"], rows)


def save_once(rank: int, world_size: int, start: str, folder: str, whole: str) -> None:
    """A step from the weights in `start`; then shards in a folder, and one whole file."""
    model = each_rank_maps(start)
    optimizer = Adam(model.parameters(), lr=0.01)
    loss_of(model, share_of_batch(rank, world_size)).backward()
    optimizer.step()
    files.save(model, optimizer, folder)
    files.write_whole(model, optimizer, whole)


def resume_once(rank: int, world_size: int, folder: str, whole: str) -> None:
    """The shards in a folder, as one whole file."""
    model = files.empty_model()
    optimizer = Adam(model.parameters(), lr=0.01)
    files.resume(model, optimizer, folder)
    files.write_whole(model, optimizer, whole)


def resume_table() -> Table:
    """Two ranks save after a step, three resume: how many tensors of both are the same."""
    with ordinary_file() as path:
        shards, *whole = (f"{path}.{name}" for name in ("shards", "a", "b"))
        launch(save_once, 2, path, shards, whole[0])
        launch(resume_once, 3, shards, whole[1])
        saved, resumed = map(torch.load, whole)
    rows = []
    for kind in ("parameters", "exp_avg", "exp_avg_sq"):
        pairs = [
            [
                one["model"][name]
                if kind == "parameters"
                else one["optimizer"]["state"][name][kind]
                for one in (saved, resumed)
            ]
            for name in saved["optimizer"]["state"]
        ]
        rows.append([kind, len(pairs), sum(torch.equal(*pair) for pair in pairs)])
    return Table(["", "saved by 2 ranks", "the same on 3"], rows)


# The compiler

DDP, DDP_1_MB = "compile(DDP(model))", "compile(DDP(model)), buckets of 1 MB"
COMPILED = (DDP, DDP_1_MB, "fully_shard, each block compiled")


def graphs_of(way: str) -> list[int]:
    """Two steps of a model of 9.6 MB; how many operations each graph of the compiler has."""
    lengths = []

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        """A backend that compiles nothing, and runs each graph as it is."""
        lengths.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    torch.compiler.reset()  # each way compiles anew
    model: nn.Module = SmallTransformer(vocabulary=64, width=256, heads=4, depth=3)
    if way in (DDP, DDP_1_MB):
        model = DistributedDataParallel(model, bucket_cap_mb=1 if way == DDP_1_MB else None)
        model = torch.compile(model, backend=count)
    else:
        for block in model.blocks:
            block.compile(backend=count)
        shard_blocks(model)
    for step in range(2):
        loss_of(model, share_of_batch(0, 1, step)).backward()
    return lengths


def compile_table() -> Table:
    """Launches one rank, for all get the same: the graphs that the compiler sees."""
    found = launch(lambda rank, _: [graphs_of(way) for way in COMPILED], 1).results[0]
    rows = [[w, len(n), ", ".join(map(str, n))] for w, n in zip(COMPILED, found, strict=True)]
    return Table(["", "graphs", "operations in each"], rows)
