"""Only measures: how wrong a mistake is, what is sent, what is kept, how long it takes."""

import time
from collections import Counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import CommDebugMode

from mgpu_tutorial.lab import Ledger, Table, launch, span
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.sharding.measurements import TRIPS
from mgpu_tutorial.tensor_parallel import rounding_measurements as rounding
from mgpu_tutorial.tensor_parallel.copies import copies_that_differ
from mgpu_tutorial.tensor_parallel.mesh import take_steps, train_on_a_mesh
from mgpu_tutorial.tensor_parallel.training import (
    Way,
    in_pieces,
    loss_and_gradients,
    new_batch,
    new_model,
    train,
    whole,
    whole_gradients,
)

# How wrong


class Step(NamedTuple):
    """A step of SGD: its loss, all gradients, and which copies then differ between ranks."""

    loss: float
    gradients: torch.Tensor
    different: list[str]


def step_once(rank: int, world_size: int, ways: tuple[Way, ...]) -> list[Step]:
    """One step of each way, in float32."""
    steps = []
    for way in ways:
        prepared = way(new_model())
        loss = loss_and_gradients(prepared).item()
        gradients = whole_gradients(prepared.model).values()
        torch.optim.SGD(prepared.model.parameters(), lr=0.1).step()
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        steps.append(Step(loss, flat, copies_that_differ(prepared.model)))
    return steps


def error_table(*ways: Way, ranks: int = 2) -> Table:
    """Launch a step of each way; how far it is from one process, and do copies differ?"""
    (alone,) = launch(step_once, 1, (whole,)).results[0]
    rows = []
    for way, found in zip(ways, launch(step_once, ranks, ways).results[0], strict=True):
        loss = abs(found.loss / alone.loss - 1)
        off = rounding.distance(found.gradients, alone.gradients)
        rows.append([name_of(way), f"{loss:.1%}", f"{off:.1%}", str(len(found.different))])
    return Table(["", "loss off", "gradients off", "copies that differ"], rows)


def name_of(way: Way) -> str:
    """As a table calls it."""
    return way.__name__.replace("_", " ")


def furthest(
    ways: tuple[Way, ...], ranks: int, reference: dict[str, torch.Tensor], **model: object
) -> dict[str, float]:
    """Launch `train` in float64; how far any parameter of any rank is from these."""
    results = launch(train_each, ranks, ways, dtype=torch.float64, **model).results
    return {
        name_of(way): max(
            apart(mine[name_of(way)][name], value)
            for mine in results
            for name, value in reference.items()
        )
        for way in ways
    }


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference; infinite where one is no number, which max() may overlook."""
    return (found - expected).abs().nan_to_num(torch.inf).max().item()


def train_each(
    rank: int, world_size: int, ways: tuple[Way, ...], **model: object
) -> dict[str, dict[str, torch.Tensor]]:
    """Train each way in the same ranks; the whole parameters of each."""
    return {name_of(way): train(rank, world_size, way, **model)[1] for way in ways}


def furthest_on_a_mesh(shape: tuple[int, int], reference: dict[str, torch.Tensor]) -> float:
    """Launch `train_on_a_mesh` in float64; how far any rank's parameters are from these."""
    double = {"dtype": torch.float64}
    results = launch(train_on_a_mesh, shape[0] * shape[1], shape, **double).results
    pairs = [(mine[name], value) for mine in results for name, value in reference.items()]
    return max(apart(mine, value) for mine, value in pairs)


def train_alone(**model: object) -> dict[str, torch.Tensor]:
    """Launch `train` on one process in float64; the parameters."""
    return launch(train, 1, whole, dtype=torch.float64, **model).results[0][1]


def share_heads(rank: int, world_size: int, kv_heads: int) -> None:
    """Share a model in which several heads have the same keys and values."""
    in_pieces(new_model(kv_heads=kv_heads))


# What is sent


def trace_steps(
    rank: int, world_size: int, ways: tuple[Way, ...], depths: tuple[int, ...]
) -> None:
    """Of each way and depth a second forward and backward; the first compares the batch."""
    for way in ways:
        for depth in depths:
            prepared = way(new_model(depth=depth))
            loss_and_gradients(prepared)
            with span(f"{way.__name__} {depth}"):
                loss_and_gradients(prepared)


def sent(report: Report, name: str) -> Counter[str]:
    """The bytes that rank 0 sends in a span, by collective; each in a ring."""
    found: Counter[str] = Counter()
    for event in events_of(report, name):
        if event.rank == 0 and event.op in TRIPS:
            ranks = len(event.group)
            # the recorder notes the smaller side of a reduce_scatter, the output
            sides = ranks if event.op == "reduce_scatter_single" else 1
            trips = TRIPS[event.op] * sides * event.nbytes
            found[event.op] += trips * (ranks - 1) // ranks
    return found


def sent_per_block(ways: tuple[Way, ...], ranks: int) -> dict[Way, Counter[str]]:
    """Launch each way with one block and with two: what the second makes a rank send."""
    report = launch(trace_steps, ranks, ways, (1, 2), trace=True)
    return {
        way: sent(report, f"{way.__name__} 2") - sent(report, f"{way.__name__} 1")
        for way in ways
    }


def formula(batch: int, sequence: int, width: int, ranks: int, nbytes: int = 4) -> int:
    """Four all-reduces, each of which sends 2 (t - 1) / t of its b·s·h numbers."""
    return 8 * batch * sequence * width * nbytes * (ranks - 1) // ranks


def block_table(*ways: Way, ranks: tuple[int, ...] = (2, 4)) -> Table:
    """Launch each way; the bytes that a rank sends per block and step, and the formula."""
    rows = []
    tokens, _ = new_batch(0)
    for count in ranks:
        expected = formula(*tokens.shape, 48, count)
        for way, found in sent_per_block(ways, count).items():
            calls = ", ".join(f"{nbytes:,} {op}" for op, nbytes in sorted(found.items()))
            rows.append([name_of(way), count, calls, sum(found.values()), expected])
    return Table(["", "ranks", "bytes per block and step", "in all", "formula"], rows)


def count_calls(
    rank: int, world_size: int, ways: tuple[Way, ...]
) -> dict[str, dict[str, int]]:
    """What PyTorch's CommDebugMode counts in a second forward and backward of each way."""
    found = {}
    for way in ways:
        prepared = way(new_model())
        loss_and_gradients(prepared)
        with CommDebugMode() as seen:
            loss_and_gradients(prepared)
        counts: Counter[str] = Counter()
        for operator, count in seen.get_comm_counts().items():
            counts[call_name(operator)] += count
        found[name_of(way)] = dict(counts)
    return found


def call_name(operator: object) -> str:
    """As everybody calls it; PyTorch's two sets of operators call it differently."""
    text = str(operator).replace("_", "")
    names = ("all_gather", "all_reduce", "reduce_scatter", "broadcast")
    return next((name for name in names if name.replace("_", "") in text), text)


def step_on_a_mesh(
    rank: int, world_size: int, shape: tuple[int, int]
) -> dict[str, list[int]]:
    """One step, for `pretend`; the shapes of what this rank keeps, by name."""
    model = take_steps(shape, steps=1, model={"heads": 8, "width": 64})
    return {name: list(p.to_local().shape) for name, p in model.named_parameters()}


# What is kept


def count_kept(rank: int, world_size: int, ways: tuple[Way, ...]) -> list[int]:
    """The bytes of activations that autograd keeps on this rank after forward."""
    found = []
    for way in ways:
        prepared = way(new_model(width=96))
        tokens, targets = new_batch(0, sequences=8, length=24)
        ledger = Ledger()
        ledger.add("batch", [tokens, targets])
        with prepared.context(), ledger.saved_for_backward(prepared.model):
            loss = prepared.loss(prepared.model(tokens), targets)
        found.append(ledger.saved_now("cpu", "activations"))
        loss.backward()
    return found


def kept_table(*ways: Way, ranks: tuple[int, ...] = (1, 2, 4)) -> Table:
    """Launch each way; the KiB that a rank keeps for backward, a column per world size."""
    columns = [launch(count_kept, count, ways).results[0] for count in ranks]
    rows = [
        [name_of(way), *(f"{nbytes / 1024:,.0f}" for nbytes in kept)]
        for way, kept in zip(ways, zip(*columns, strict=True), strict=True)
    ]
    return Table(["KiB kept for backward", *(f"of {n}" for n in ranks)], rows)


# On a link


def link_table(
    width: int = 8192,
    tokens: int = 8192,
    ranks: int = 8,
    replicas: int = 64,
    links: tuple[float, ...] = (450, 50, 3),
    speed: float = 4e14,
) -> Table:
    """By formula, in bfloat16: milliseconds per block and step of each dimension and link.

    `tokens` are those of a rank's batch, `links` in GB/s that a rank can send, `speed` in
    operations per second.
    """
    tensor = formula(1, tokens, width, ranks, nbytes=2)
    parameters = 12 * width**2 / ranks  # of a block, on a rank
    data = 3 * 2 * parameters * (replicas - 1) / replicas
    rows = [
        [name, f"{nbytes / 1e6:.0f} MB", *(f"{nbytes / link / 1e6:.1f}" for link in links)]
        for name, nbytes in (("tensor parallel", tensor), ("fully_shard", data))
    ]
    compute = 6 * parameters * tokens / speed * 1e3
    rows.append(["compute", "", *[f"{compute:.1f}"] * len(links)])
    return Table(["ms per block", "sent", *(f"{link:.0f} GB/s" for link in links)], rows)


# How long


def time_ways(
    rank: int,
    world_size: int,
    ways: dict[str, Way],
    model: dict[str, int],
    batch: tuple[int, int],
    steps: int,
) -> dict[str, list[tuple[float, float]]]:
    """The seconds of each way's forward with loss, and of its backward, in turns.

    After two turns that do not count. `model` are the arguments of a SmallTransformer,
    `batch` the sequences and their tokens.
    """
    prepared = {name: way(new_model(**model)) for name, way in ways.items()}
    tokens, targets = new_batch(0, *batch, model["vocabulary"])
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(2 + steps):
        for name, one in prepared.items():
            one.model.zero_grad()
            dist.barrier()
            with one.context():
                begin = time.perf_counter()
                loss = one.loss(one.model(tokens), targets)
                middle = time.perf_counter()
                loss.backward()
            one.after_backward()
            times[name].append((middle - begin, time.perf_counter() - middle))
    return {name: found[2:] for name, found in times.items()}
