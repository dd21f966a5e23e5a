"""Apparatus, not the lesson: what the ways of this chapter hold and send, as tables."""

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, Muon
from torch.profiler import ProfilerActivity, profile

from mgpu_tutorial.fully_shard.files import empty_model, read_weights
from mgpu_tutorial.fully_shard.large import muon_step
from mgpu_tutorial.fully_shard.units import loss_of, new_model, shard_blocks, share_of_batch
from mgpu_tutorial.lab import Ledger, Table, launch, span
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.shared.models import SmallTransformer

MODEL = 4 * 41_888  # bytes in float32
PASSES = {"all_reduce": 2, "all_gather_single": 1, "reduce_scatter_single": 1, "broadcast": 1}
Prepare = Callable[[nn.Module], nn.Module | None]


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
) -> dict[str, object]:
    """One step of the model as `prepare` leaves it: what this rank holds, its gradients."""
    model = new_model(dtype)
    for change in prepare:
        wrapped = change(model) or model
    micro_batches = share_of_batch(rank, world_size).chunk(parts)
    seen: dict[str, object] = {}
    whole_bytes: list[int] = []
    ledger, before = Ledger(), held()

    def look_between(*_given: object) -> None:
        seen["between"] = held() - before

    def look(block: nn.Module, _inputs: tuple) -> None:
        whole = [p for p in model.parameters() if not isinstance(p, DTensor)]
        whole_bytes.append(sum(p.nbytes for p in whole))
        ledger.add("parameters", whole)

    if parts > 1:
        model.register_forward_pre_hook(
            look_between, prepend=True
        )  # before fully_shard's own
    for block in model.blocks:
        block.register_forward_pre_hook(look)  # after fully_shard's own
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = Adam(trained)
    with ledger.saved_for_backward(), span("step"):
        backward(wrapped, micro_batches)
    optimizer.step()
    moments = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    seen |= {f"as block {i} begins": nbytes for i, nbytes in enumerate(whole_bytes)}
    seen["activations"] = ledger.saved_peak(torch.get_default_device())
    seen["parameters"] = sum(here(p).nbytes for p in model.parameters())
    seen["gradients"] = sum(here(p.grad).nbytes for p in trained)
    seen["Adam"] = sum(here(moment).nbytes for moment in moments)
    named = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
    seen["whole"] = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in named}
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


def traffic_of(report: Report) -> dict[str, float]:
    """How often the model passes a ring in rank 0's step: gathered, scattered, averaged."""
    passed: Counter[str] = Counter()
    for event in events_of(report, "step"):
        if event.rank == 0 and event.op in PASSES and len(event.group) > 1:
            sides = len(event.group) if event.op == "reduce_scatter_single" else 1
            passed[event.op] += PASSES[event.op] * sides * event.nbytes
    names = {"gathered": "all_gather_single", "reduced": "reduce_scatter_single"}
    names |= {"averaged": "all_reduce", "sent": "broadcast"}
    return {name: f"{passed[op] / MODEL:.2f}" for name, op in names.items()}


def compare(ways: Mapping[str, Sequence[Prepare]], *columns: str, ranks: int = 2) -> Table:
    """Launches each way to prepare the model; bytes of rank 0, and traffic in models."""
    rows = []
    for name, prepare in ways.items():
        report = launch(measure, ranks, prepare, trace=True)
        found = report.results[0] | traffic_of(report)
        rows.append([name, *(found[column] for column in columns)])
    return Table(["", *columns], rows)


def accumulation_table(way: Callable) -> Table:
    """Launches two ranks with four micro-batches; what is sent, and what stays between."""
    rows = []
    for backward in (each_is_sent, way):
        report = launch(measure, 2, [shard_blocks], backward, parts=4, trace=True)
        found = report.results[0] | traffic_of(report)
        columns = "gathered", "reduced", "between"
        rows.append([backward.__name__, *(found[column] for column in columns)])
    return Table(["four micro-batches", "gathered", "reduced", "bytes in between"], rows)


def furthest(ranks: int, prepare: Sequence[Prepare], **step: object) -> float:
    """Launches a step in float64; how far any gradient is from that of one process."""
    alone = new_model(torch.float64)
    loss_of(alone, share_of_batch(0, 1)).backward()
    expected = {name: p.grad for name, p in alone.named_parameters()}
    found = launch(measure, ranks, prepare, dtype=torch.float64, **step).results
    whole = [{name: result["whole"][name] for name in expected} for result in found]
    return largest_difference(whole, [expected] * ranks)


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
    model = empty_model()
    set_model_state_dict(model, whole, options=options)
    return model


def each_rank_maps(path: str) -> nn.Module:
    """Ours: each rank maps the file and copies its rows."""
    model = empty_model()
    read_weights(model, path)
    return model


def peak_of(rank: int, world_size: int, path: str, load: Callable) -> int:
    """The most bytes that were allocated at one moment; a mapped file is not among them."""
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record,
        span("step"),
    ):
        load(path)
    events = sorted(record.events(), key=lambda event: event.time_range.end)
    changes = [event.self_cpu_memory_usage for event in events]
    mapped = Path(path).stat().st_size
    return max(itertools.accumulate(change for change in changes if abs(change) != mapped))


def loading_table(path: str) -> Table:
    """Launches four ranks with each way to load a file."""
    rows = []
    for load in (every_rank_reads, rank_0_sends, each_rank_maps):
        report = launch(peak_of, 4, path, load, trace=True)
        peak = report.results[0] / MODEL
        sent = sum(e.nbytes for e in report.events if e.rank == 0 and e.op == "broadcast")
        rows.append([load.__name__, f"{peak:.1f}", f"{sent / MODEL:.1f}"])
    return Table(["whole models", "peak of rank 0", "sent by rank 0"], rows)


# The compiler, and Muon


class Notes:
    """A backend that compiles nothing: it runs each graph, and notes how long it is."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        calls = [node for node in graph.graph.nodes if node.op.startswith("call")]
        self.lengths.append(len(calls))
        return graph.forward


def compile_ways(rank: int, world_size: int, ways: Sequence[str]) -> list[list[int]]:
    """Two steps of a model of 9.6 MB in each way; how many operations each graph has."""
    lengths = []
    for way in ways:
        torch.manual_seed(0)
        torch.compiler.reset()  # each way compiles anew
        model: nn.Module = SmallTransformer(vocabulary=64, width=256, heads=4, depth=3)
        notes = Notes()
        if way == "fully_shard, each block compiled":
            for block in model.blocks:
                block.compile(backend=notes)
        if "fully_shard" in way:
            shard_blocks(model)
        if "DDP" in way:
            model = DistributedDataParallel(model, bucket_cap_mb=1 if "1 MB" in way else None)
        if way.startswith("compile"):
            model = torch.compile(model, backend=notes)
        for step in range(2):
            loss_of(model, share_of_batch(rank, world_size, step)).backward()
        lengths.append(notes.lengths)
    return lengths


def compile_table(*ways: str) -> Table:
    """Launches two ranks; the graphs that the compiler gets in each way."""
    found = launch(compile_ways, 2, ways).results[0]
    rows = [[w, len(n), ", ".join(map(str, n))] for w, n in zip(ways, found, strict=True)]
    return Table(["", "graphs", "operations in each"], rows)


def muon(rank: int, world_size: int, step: Callable) -> tuple[int, list[torch.Tensor]]:
    """A step on the matrices of the blocks: how many collectives, and how they moved."""
    model = new_model(torch.float64)
    shard_blocks(model)
    loss_of(model, share_of_batch(rank, world_size)).backward()
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    before = [p.full_tensor().detach().clone() for p in matrices]
    with CommDebugMode() as calls:
        step(matrices)
    after = [p.full_tensor().detach() for p in matrices]
    return calls.get_total_counts(), [b - a for a, b in zip(before, after, strict=True)]


def on_dtensors(matrices: list[nn.Parameter]) -> None:
    """Muon as it is, on sharded parameters."""
    Muon(matrices, lr=0.1).step()


def on_shards(matrices: list[nn.Parameter]) -> None:
    """A mistake: each rank steps its rows as if they were a matrix."""
    mine = [nn.Parameter(p.to_local()) for p in matrices]
    for part, p in zip(mine, matrices, strict=True):
        part.grad = p.grad.to_local()
    Muon(mine, lr=0.1).step()


def muon_table() -> Table:
    """Launches two ranks with each way to step, and one process; are they alike?"""
    (_, one), rows = launch(muon, 1, muon_step).results[0], []
    size = torch.cat([x.flatten() for x in one]).norm()
    for step in (on_shards, on_dtensors, muon_step):
        calls, moved = launch(muon, 2, step).results[0]
        apart = torch.cat([(x - y).flatten() for x, y in zip(moved, one, strict=True)])
        within = "yes" if apart.norm() < 0.1 * size else "no"
        rows.append([step.__name__, calls, within])
    return Table(["", "collectives", "within 10 % of one process"], rows)
