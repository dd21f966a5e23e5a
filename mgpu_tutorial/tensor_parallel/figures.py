"""Apparatus, not the lesson: errors, bytes and rounding of the ways, drawn and in tables."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import linear

from mgpu_tutorial.lab import Ledger, Table, launch, span
from mgpu_tutorial.lab.colours import COLOURS, colour, tone
from mgpu_tutorial.lab.draw.drawing import ALARM, FAINT, INK, Drawing
from mgpu_tutorial.lab.draw.plot import MARKERS, Plot
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.traffic import ring_passes
from mgpu_tutorial.shared.models import SmallTransformer
from mgpu_tutorial.tensor_parallel.block import (
    copies_that_differ,
    fingerprints,
    sum_replicated_gradients,
)
from mgpu_tutorial.tensor_parallel.layers import Product, X
from mgpu_tutorial.tensor_parallel.torch_plan import take_steps, train_on_a_mesh
from mgpu_tutorial.tensor_parallel.training import (
    Trainable,
    Way,
    flat_cross_entropy,
    in_pieces,
    loss_and_gradients,
    new_batch,
    new_model,
    train,
    whole,
    whole_gradients,
    without_sum_of_replicated,
)

# Matrices: what each rank holds of them

SIDE, GAP, TOP, LEFT = 34, 26, 58, 74  # pixels
COPY, PIECE, PART = "copy", "piece", "part of a sum"


def product_picture(products: Sequence[Product]) -> Drawing:
    """Draw what each rank had and computed in two products in a row."""
    kinds = {"X": COPY, "columns of A": PIECE, "X A": PIECE, "rows of B": PIECE}
    kinds |= {"part of X A B": PART, "all-reduce: X A B": COPY}
    rows = [[X, p.columns, p.hidden, p.rows, p.part, p.result] for p in products]
    return matrices(kinds, rows)


def placement_picture(held: Sequence[Mapping[str, torch.Tensor]]) -> Drawing:
    """Draw what each rank holds of some distributed tensors, titled by their placements."""
    known = {"Replicate": COPY, "Shard": PIECE, "Partial": PART}
    kinds = {title: known[title.split(": ")[1].partition("(")[0]] for title in held[0]}
    return matrices(kinds, [list(one.values()) for one in held])


def matrices(kinds: Mapping[str, str], rows: Sequence[Sequence[torch.Tensor]]) -> Drawing:
    """Draw a row of matrices per rank; `kinds` are the titles and what each of them is."""
    titles = [title.split(": ") for title in kinds]
    wide = [
        max(
            *(SIDE * matrix.shape[1] for matrix in column),
            *(8.2 * len(line) for line in title),
        )
        for title, column in zip(titles, zip(*rows, strict=True), strict=True)
    ]
    tall = [SIDE * max(matrix.shape[0] for matrix in row) for row in rows]
    xs, ys = _middles(wide, LEFT), _middles(tall, TOP)
    text = "\n".join(
        f"rank {rank}: "
        + "; ".join(f"{t} {m.tolist()}" for t, m in zip(kinds, row, strict=True))
        for rank, row in enumerate(rows)
    )
    height = TOP + sum(tall) + GAP * len(tall) + 24
    name = "What each rank holds: " + ", ".join(kinds)
    drawing = Drawing(LEFT + sum(wide) + GAP * len(wide), height, text, name)
    for x, title in zip(xs, titles, strict=True):
        for i, line in enumerate(title):
            drawing.label(x, 20 + 18 * i, line, 13, weight="bold")
    for rank, (y, row) in enumerate(zip(ys, rows, strict=True)):
        drawing.label(10, y + 5, f"rank {rank}", 14, tone(rank).text, "start", "bold")
        for x, kind, matrix in zip(xs, kinds.values(), row, strict=True):
            _matrix(drawing, x, y, matrix, rank, kind)
    legend = "grey: the same on every rank · filled: only here · dashed: a part of a sum"
    drawing.label(LEFT, height - 10, legend, 14, anchor="start")
    return drawing


def _middles(sizes: Sequence[float], start: float) -> list[float]:
    """Where the middle of each lies if they stand in a row, with a gap between them."""
    return [start + sum(sizes[:i]) + GAP * i + size / 2 for i, size in enumerate(sizes)]


def _matrix(
    drawing: Drawing, x: float, y: float, matrix: torch.Tensor, rank: int, kind: str
) -> None:
    """The numbers of a matrix in boxes around (x, y)."""
    fill, edge, ink, dash = {
        COPY: ("#e4e4e4", FAINT, INK, ""),
        PIECE: (colour(rank), INK, tone(rank).on, ""),
        PART: ("#ffffff", colour(rank), INK, "4 3"),
    }[kind]
    high, wide = matrix.shape
    for i, line in enumerate(matrix.tolist()):
        for j, number in enumerate(line):
            left, top = x + SIDE * (j - wide / 2), y + SIDE * (i - high / 2)
            drawing.box(left + 1, top + 1, SIDE - 2, SIDE - 2, edge, fill, 1.5, dash, 3)
            middle = left + SIDE / 2, top + SIDE / 2 + 5
            drawing.label(*middle, number, 13, ink, weight="bold")


# How wrong


class SgdStep(NamedTuple):
    """A step of SGD: its loss, all gradients, and which copies then differ between ranks."""

    loss: float
    gradients: torch.Tensor
    different: list[str]


def step_once(rank: int, world_size: int, ways: tuple[Way, ...]) -> list[SgdStep]:
    """One step of each way, in float32."""
    steps = []
    for way in ways:
        trainable = way(new_model())
        loss = loss_and_gradients(trainable).item()
        flat = flat_gradients(trainable)
        torch.optim.SGD(trainable.model.parameters(), lr=0.1).step()
        steps.append(SgdStep(loss, flat, copies_that_differ(trainable.model)))
    return steps


def error_table(*ways: Way, ranks: int = 2) -> Table:
    """Launch a step of each way; how far it is from one process, and do copies differ?"""
    (alone,) = launch(step_once, 1, (whole,)).results[0]
    rows = []
    for way, found in zip(ways, launch(step_once, ranks, ways).results[0], strict=True):
        loss = abs(found.loss / alone.loss - 1)
        off = distance(found.gradients, alone.gradients)
        rows.append([name_of(way), f"{loss:.1%}", f"{off:.1%}", str(len(found.different))])
    return Table(["", "loss off", "gradients off", "copies that differ"], rows)


def name_of(way: Way) -> str:
    """As a table calls it."""
    return way.__name__.replace("_", " ")


def furthest(
    ways: tuple[Way, ...], ranks: int, reference: dict[str, torch.Tensor]
) -> dict[str, float]:
    """Launch `train` in float64; how far any parameter of any rank is from these."""
    runs = {way: launch(train, ranks, way, dtype=torch.float64).results for way in ways}
    return {
        name_of(way): largest_difference([mine for _, mine in run], [reference] * ranks)
        for way, run in runs.items()
    }


def furthest_on_a_mesh(shape: tuple[int, int], reference: dict[str, torch.Tensor]) -> float:
    """Launch `train_on_a_mesh` in float64; how far any rank's parameters are from these."""
    results = launch(train_on_a_mesh, shape[0] * shape[1], shape, dtype=torch.float64).results
    return largest_difference(results, [reference] * len(results))


def train_alone() -> dict[str, torch.Tensor]:
    """Launch `train` on one process in float64; the parameters."""
    return launch(train, 1, whole, dtype=torch.float64).results[0][1]


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
            trainable = way(new_model(depth=depth))
            loss_and_gradients(trainable)
            with span(f"{way.__name__} {depth}"):
                loss_and_gradients(trainable)


def sent(report: Report, name: str) -> Counter[str]:
    """The bytes that rank 0 sends in a span, by collective; each in a ring."""
    n = report.world_size
    passes = ring_passes(report, name)
    return Counter({op: nbytes * (n - 1) // n for op, nbytes in passes.items()})


def formula(batch: int, sequence: int, width: int, ranks: int, nbytes: int = 4) -> int:
    """Four all-reduces, each of which sends 2 (t - 1) / t of its b·s·h numbers."""
    return 8 * batch * sequence * width * nbytes * (ranks - 1) // ranks


def block_table(*ways: Way, ranks: tuple[int, ...] = (2, 4)) -> Table:
    """Launch each way; the bytes that a rank sends per block and step, and the formula."""
    rows = []
    tokens, _ = new_batch(0)
    for count in ranks:
        report = launch(trace_steps, count, ways, (1, 2), trace=True)
        expected = formula(*tokens.shape, 48, count)
        for way in ways:
            # what the second block makes a rank send
            found = sent(report, f"{way.__name__} 2") - sent(report, f"{way.__name__} 1")
            calls = ", ".join(f"{nbytes:,} {op}" for op, nbytes in sorted(found.items()))
            rows.append([name_of(way), count, calls, sum(found.values()), expected])
    return Table(["", "ranks", "bytes per block and step", "in all", "formula"], rows)


def count_calls(
    rank: int, world_size: int, ways: tuple[Way, ...]
) -> dict[str, dict[str, int]]:
    """What PyTorch's CommDebugMode counts in a second forward and backward of each way."""
    calls, found = ("all_gather", "all_reduce", "reduce_scatter", "broadcast"), {}
    for way in ways:
        trainable = way(new_model())
        loss_and_gradients(trainable)
        with CommDebugMode() as seen:
            loss_and_gradients(trainable)
        counts: Counter[str] = Counter()
        for operator, count in seen.get_comm_counts().items():
            # PyTorch has two sets of operators: c10d.allreduce_, all_reduce
            text = str(operator).replace("_", "")
            counts[next((n for n in calls if n.replace("_", "") in text), text)] += count
        found[name_of(way)] = dict(counts)
    return found


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
        trainable = way(new_model(width=96))
        tokens, targets = new_batch(0, sequences=8, length=24)
        ledger = Ledger()
        ledger.add("batch", [tokens, targets])
        with trainable.context(), ledger.saved_for_backward(trainable.model):
            loss = trainable.loss(trainable.model(tokens), targets)
        found.append(ledger.saved_now("cpu"))
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


def link_table() -> Table:
    """By formula, in bfloat16: milliseconds per block and step of each dimension and link.

    A width of 8,192, as many tokens in a rank's batch, 8 ranks and 64 replicas; links in GB/s
    that a rank can send; 4e14 operations a second.
    """
    width, tokens, ranks, replicas, links = 8192, 8192, 8, 64, (450, 50, 3)
    parameters = 12 * width**2 / ranks  # of a block, on a rank
    tensor = formula(1, tokens, width, ranks, nbytes=2)
    data = 3 * 2 * parameters * (replicas - 1) / replicas
    rows = [
        [name, f"{nbytes / 1e6:.0f} MB", *(f"{nbytes / link / 1e6:.1f}" for link in links)]
        for name, nbytes in (("tensor parallel", tensor), ("fully_shard", data))
    ]
    compute = 6 * parameters * tokens / 4e14 * 1e3
    rows.append(["compute", "", *[f"{compute:.1f}"] * len(links)])
    return Table(["ms per block", "sent", *(f"{link} GB/s" for link in links)], rows)


# Rounding: a sum of rounded numbers depends on its order. One process adds up the same
# products in pieces as t ranks would, but shares the features out at random: what differs is
# rounding. How far the gradients of many such runs lie from the plain run is the band in
# which a run on ranks must lie as well.

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class InGroups(nn.Module):
    """A linear layer, computed in groups of its outputs (`dim` 0) or of its inputs (1).

    The outputs are put back in their order; the parts that groups of inputs make are rounded
    one by one and added up.
    """

    def __init__(self, layer: nn.Linear, dim: int, groups: list[torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.bias, self.dim, self.groups = layer.weight, layer.bias, dim, groups
        self.back = torch.cat(groups).argsort()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.dim == 0:
            result = torch.cat([linear(x, self.weight[g]) for g in self.groups], -1)
            result = result[..., self.back]
        else:
            result = sum(linear(x[..., g], self.weight[:, g]) for g in self.groups)
        return result if self.bias is None else result + self.bias


def reordered(model: SmallTransformer, pieces: int, seed: int) -> Trainable:
    """The same model in one process, with its sums in pieces and in a random order."""
    generator = torch.Generator().manual_seed(seed)

    def share_out(many: int) -> list[torch.Tensor]:
        return list(torch.randperm(many, generator=generator).tensor_split(pieces))

    for block in model.blocks:
        attention, mlp = block.attention, block.mlp
        columns = torch.arange(attention.query.out_features).view(-1, attention.per_head)
        heads = [columns[group].flatten() for group in share_out(len(columns))]
        for name in ("query", "key", "value"):
            setattr(attention, name, InGroups(getattr(attention, name), 0, heads))
        attention.out = InGroups(attention.out, 1, heads)
        features = share_out(mlp.up.out_features)
        mlp.up, mlp.down = InGroups(mlp.up, 0, features), InGroups(mlp.down, 1, features)
    model.head = InGroups(model.head, 0, share_out(model.head.out_features))
    return Trainable(model, flat_cross_entropy)


def gradients(way: Way, dtype: torch.dtype) -> torch.Tensor:
    """All gradients of the first batch side by side, as float64; the same on every rank."""
    trainable = way(new_model(dtype))
    loss_and_gradients(trainable)
    return flat_gradients(trainable).double()


def flat_gradients(trainable: Trainable) -> torch.Tensor:
    """All gradients side by side, the same on every rank."""
    found = whole_gradients(trainable.model).values()
    return torch.cat([gradient.flatten() for gradient in found])


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How long the difference is, in shares of what is expected."""
    return ((found - expected).norm() / expected.norm()).item()


def random_orders(
    rank: int, world_size: int
) -> tuple[dict[str, torch.Tensor], dict[str, list[float]]]:
    """In each dtype the gradients of the plain run, and how far off each random order is."""
    plain, orders = {}, {}
    for name, dtype in DTYPES.items():
        plain[name] = gradients(whole, dtype)
        ways = (partial(reordered, pieces=n, seed=s) for n in (2, 4) for s in range(8))
        orders[name] = [distance(gradients(way, dtype), plain[name]) for way in ways]
    return plain, orders


def distances(
    rank: int, world_size: int, way: Way, plain: dict[str, torch.Tensor]
) -> dict[str, float]:
    """How far the gradients of a way lie from those of one process, in each dtype."""
    return {n: distance(gradients(way, dtype), plain[n]) for n, dtype in DTYPES.items()}


class Band(NamedTuple):
    """How far the random orders lie from one process, by dtype; and some ways, by name."""

    orders: dict[str, list[float]]
    ways: dict[str, dict[str, float]]

    def limit(self, dtype: str) -> float:
        """Beyond this it is no rounding: twice the farthest of the random orders."""
        return 2 * max(self.orders[dtype])


def measure_band(ways: dict[str, tuple[int, Way]]) -> Band:
    """Launch one process for the band, and each way on so many ranks."""
    plain, orders = launch(random_orders, 1).results[0]
    found = {
        name: launch(distances, ranks, way, plain).results[0]
        for name, (ranks, way) in ways.items()
    }
    return Band(orders, found)


def verdicts(band: Band) -> Table:
    """One row per way: its distance in each dtype, and whether that is within rounding."""
    rows = [["the band ends at", *(f"{band.limit(dtype):.1e}" for dtype in band.orders)]]
    for name, found in band.ways.items():
        far = {d: off > band.limit(d) for d, off in found.items()}
        rows.append(
            [name, *(f"{found[d]:.1e} {'outside' if far[d] else 'inside'}" for d in far)]
        )
    return Table(["gradients off", *band.orders], rows)


def band_picture(band: Band) -> Plot:
    """Draw how far the gradients of each way lie from one process, beside random orders."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    for place, (name, orders) in enumerate(band.orders.items()):
        low, high = min(orders), band.limit(name)
        label = "rounding: random orders, up to twice the farthest" if place == 0 else None
        style = {"color": "#c9c9c9", "edgecolor": INK, "linewidth": 0.8, "label": label}
        axes.bar(place, high - low, 0.7, low, **style)
    for i, (way, found) in enumerate(band.ways.items()):
        wrong = found["float64"] > band.limit("float64")
        look = {"marker": MARKERS[i], "color": ALARM if wrong else COLOURS[i]}
        xs = [place + 0.14 * (i - (len(band.ways) - 1) / 2) for place in range(len(found))]
        axes.scatter(xs, list(found.values()), 70, **look, label=way, zorder=3)
    axes.set_xticks(range(len(band.orders)), list(band.orders), fontsize=12)
    axes.set(yscale="log", ylabel="gradients off, in shares of their length")
    axes.set_ylim(1e-17, 1)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=11, loc="lower right")
    named = ", ".join([*band.ways, "random orders"])
    return Plot(figure, f"distance from one process in {', '.join(band.orders)}: {named}")


# The first exercise: sequence parallel with a planted bug

FORGOTTEN = ["blocks.0.mlp.down.bias", "blocks.1.mlp.down.bias"]


def step_with_a_bug(rank: int, world_size: int) -> dict[str, str]:
    """A step with sequence parallel and a bug; the bits of each whole parameter by name."""
    trainable = without_sum_of_replicated(new_model())
    loss_and_gradients(trainable)
    model = trainable.model
    hidden = {name: model.get_parameter(name).grad.clone() for name in FORGOTTEN}
    sum_replicated_gradients(model)
    for name, gradient in hidden.items():
        model.get_parameter(name).grad = gradient
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return fingerprints(model)


# The second exercise: a layer by rows


def blindfold(
    rank: int, world_size: int, by_rows: Callable, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """Call the reader's layer with nan in place of the features that other ranks have."""
    theirs = torch.ones(x.shape[-1], dtype=torch.bool)
    theirs.tensor_split(world_size)[rank].fill_(False)
    hidden = (tensor.masked_fill(theirs, torch.nan) for tensor in (x, weight))
    return by_rows(rank, world_size, *hidden)
