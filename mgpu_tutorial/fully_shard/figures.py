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
from mgpu_tutorial.lab.record.intervals import payload
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.traffic import ring_passes
from mgpu_tutorial.shared.models import SmallTransformer

MODEL = 4 * 41_888  # bytes in float32
Prepare = Callable[[nn.Module], nn.Module | None]
Ways = Mapping[str, Sequence[Prepare]]  # by name, what prepares the model, in its order


# Any way to prepare the model and to go back


def each_is_sent(model: nn.Module, micro_batches: Sequence[torch.Tensor]) -> None:
    """The loop of one process, with nothing switched off."""
    for tokens in micro_batches:
        (loss_of(model, tokens) / len(micro_batches)).backward()


def with_ddp(model: nn.Module) -> nn.Module:
    """DDP, and its own all-reduce as a hook, where the recorder sees it."""
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, allreduce_hook)
    return wrapped


def measure(
    rank: int,
    world_size: int,
    prepare: Sequence[Prepare],
    backward: Callable = each_is_sent,
    parts: int = 1,
    dtype: torch.dtype = torch.float32,
    name: str = "step",
    steps: bool = False,
) -> dict[str, object]:
    """Forward and backward of the model as `prepare` leaves it, and one step if `steps`."""
    model = new_model(dtype)
    for change in prepare:
        wrapped = change(model) or model
    micro_batches = share_of_batch(rank, world_size).chunk(parts)
    seen: dict[str, object] = {}
    ledger, before = Ledger(), held() if parts > 1 else 0

    def look_between(*_given: object) -> None:
        seen["between"] = held() - before

    def look(block: nn.Module, _inputs: tuple) -> None:
        whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
        ledger.add("parameters", whole)  # which are no activations

    if parts > 1:  # before fully_shard's own
        model.register_forward_pre_hook(look_between, prepend=True)
    whole_bytes = watch_units(model)
    for block in model.blocks:
        block.register_forward_pre_hook(look)
    trained = [p for p in model.parameters() if p.requires_grad]
    with ledger.saved_for_backward(), span(name):
        backward(wrapped, micro_batches)
    seen |= {f"as block {i} begins": nbytes for i, nbytes in enumerate(whole_bytes)}
    seen["activations"] = ledger.saved_peak(torch.get_default_device())
    seen["parameters"] = sum(here(p).nbytes for p in model.parameters())
    seen["gradients"] = sum(here(p.grad).nbytes for p in trained)
    if steps:
        optimizer = Adam(trained)
        optimizer.step()
        states = optimizer.state.values()
        moments = [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")]
        seen["Adam"] = sum(here(moment).nbytes for moment in moments)
    if dtype == torch.float64:  # to be compared
        named = [(n, p.grad) for n, p in model.named_parameters() if p.grad is not None]
        seen["whole"] = {
            n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in named
        }
    return seen


def here(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


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


def measure_each(rank: int, world_size: int, ways: Ways, **step: object) -> dict[str, dict]:
    """The same of each way to prepare the model, one after the other."""
    return {
        name: measure(rank, world_size, prepare, name=name, **step)
        for name, prepare in ways.items()
    }


def measure_parts(rank: int, world_size: int, backwards: Sequence[Callable]) -> dict:
    """The same of each way to go back, in four micro-batches."""
    return {
        backward.__name__: measure(
            rank, world_size, [shard_blocks], backward, parts=4, name=backward.__name__
        )
        for backward in backwards
    }


def traffic_of(report: Report, name: str) -> dict[str, float]:
    """How often the model passes a ring in rank 0's step: gathered, scattered, averaged."""
    passed, calls = ring_passes(report, name), {"averaged": "all_reduce"}
    calls |= {"gathered": "all_gather_single", "reduced": "reduce_scatter_single"}
    return {column: f"{passed[op] / MODEL:.2f}" for column, op in calls.items()}


def compare(ways: Ways, *columns: str, ranks: int = 2) -> Table:
    """Launches each way to prepare the model; bytes of rank 0, and traffic in models."""
    report, rows = launch(measure_each, ranks, ways, steps="Adam" in columns, trace=True), []
    for name, found in report.results[0].items():
        found |= traffic_of(report, name)
        rows.append([name, *(found[column] for column in columns)])
    return Table(["", *columns], rows)


def accumulation_table(way: Callable) -> Table:
    """Launches two ranks with four micro-batches; what is sent, and what stays between."""
    report = launch(measure_parts, 2, [each_is_sent, way], trace=True)
    rows = []
    for name, found in report.results[0].items():
        found |= traffic_of(report, name)
        rows.append([name, *(found[column] for column in ("gathered", "reduced", "between"))])
    return Table(["four micro-batches", "gathered", "reduced", "bytes in between"], rows)


def furthest(rank: int, world_size: int, ways: Ways) -> dict[str, float]:
    """How far any gradient of each way is from that of one process."""
    alone = new_model(torch.float64)
    loss_of(alone, share_of_batch(0, 1)).backward()
    expected = {name: p.grad for name, p in alone.named_parameters()}
    found = measure_each(rank, world_size, ways, dtype=torch.float64)
    return {name: largest_difference(one["whole"], expected) for name, one in found.items()}


def distances_table(ways: Ways, ranks: int) -> Table:
    """Launches each way in float64, and compares the gradients of all ranks."""
    results, rows = launch(furthest, ranks, ways).results, []
    for way in ways:
        far = max(result[way] for result in results)
        rows.append([way, "below 1e-12" if far < 1e-12 else f"{far:.0e}"])
    return Table([f"{ranks} ranks, float64", "from one process"], rows)


# Muon


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


def peaks_of(rank: int, world_size: int, path: str, looks: int = 0) -> list[int]:
    """The most bytes that rank `looks` has in each of LOADS, without a mapped file's."""
    peaks, mapped = [], Path(path).stat().st_size
    for load in LOADS:
        if rank != looks:
            load(path)
            continue
        gc.collect()
        watched = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with watched as record, span(load.__name__):
            load(path)
        events = sorted(record.events(), key=lambda event: event.time_range.end)
        changes = [event.self_cpu_memory_usage for event in events]
        kept = [change for change in changes if abs(change) != mapped]
        peaks.append(max(itertools.accumulate(kept)))
    return peaks


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
        report = launch(peaks_of, 4, path, trace=True)
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
    """Two ranks save after a step, three resume: the numbers of both whole files."""
    with ordinary_file() as path:
        shards, *whole = (f"{path}.{name}" for name in ("shards", "a", "b"))
        launch(save_once, 2, path, shards, whole[0])
        launch(resume_once, 3, shards, whole[1])
        return state_table(*map(torch.load, whole))


def state_table(saved: dict, resumed: dict) -> Table:
    """Of two whole files, how many parameters and moments they have, and how many alike."""
    pairs: dict[str, list[tuple]] = {"parameters": [], "exp_avg": [], "exp_avg_sq": []}
    for name, moments in saved["optimizer"]["state"].items():
        others = resumed["optimizer"]["state"][name]
        pairs["parameters"].append((saved["model"][name], resumed["model"][name]))
        for key in ("exp_avg", "exp_avg_sq"):
            pairs[key].append((moments[key], others[key]))
    rows = [[k, len(p), sum(torch.equal(*one) for one in p)] for k, p in pairs.items()]
    return Table(["", "saved by 2 ranks", "the same on 3"], rows)


# The compiler


class Notes:
    """A backend that compiles nothing: it runs each graph, and notes how long it is."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        calls = [node for node in graph.graph.nodes if node.op.startswith("call")]
        self.lengths.append(len(calls))
        return graph.forward


COMPILED = (
    "compile(DDP(model))",
    "compile(DDP(model)), buckets of 1 MB",
    "fully_shard, each block compiled",
)


def compile_ways(rank: int, world_size: int) -> list[list[int]]:
    """Two steps of a model of 9.6 MB in each way; how many operations each graph has."""
    lengths = []
    for way in COMPILED:
        torch.manual_seed(0)
        torch.compiler.reset()  # each way compiles anew
        model: nn.Module = SmallTransformer(vocabulary=64, width=256, heads=4, depth=3)
        notes = Notes()
        if way == COMPILED[2]:
            for block in model.blocks:
                block.compile(backend=notes)
            shard_blocks(model)
        else:
            model = DistributedDataParallel(model, bucket_cap_mb=1 if "1 MB" in way else None)
            model = torch.compile(model, backend=notes)
        for step in range(2):
            loss_of(model, share_of_batch(rank, world_size, step)).backward()
        lengths.append(notes.lengths)
    return lengths


def compile_table() -> Table:
    """Launches one rank, for all get the same: the graphs that the compiler sees."""
    found = launch(compile_ways, 1).results[0]
    rows = [[w, len(n), ", ".join(map(str, n))] for w, n in zip(COMPILED, found, strict=True)]
    return Table(["", "graphs", "operations in each"], rows)
