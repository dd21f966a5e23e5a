"""Apparatus, not the lesson: errors, bytes and rounding of the ways, drawn and in tables."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import gelu, linear, scaled_dot_product_attention

from mgpu_tutorial.lab import Ledger, Table, launch, span
from mgpu_tutorial.lab.colours import COLOURS, colour, tone
from mgpu_tutorial.lab.draw.drawing import ALARM, FAINT, INK, Drawing
from mgpu_tutorial.lab.draw.plot import MARKERS, Plot
from mgpu_tutorial.lab.measure import in_turns, largest_difference
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.sharding.figures import TRIPS
from mgpu_tutorial.shared.models import MLP, Attention, SmallTransformer
from mgpu_tutorial.tensor_parallel.block import sum_replicated_gradients
from mgpu_tutorial.tensor_parallel.copies import copies_that_differ, fingerprints
from mgpu_tutorial.tensor_parallel.product import Product
from mgpu_tutorial.tensor_parallel.product import X as INPUT
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
    kinds = {
        "X": COPY,
        "columns of A": PIECE,
        "X A": PIECE,
        "rows of B": PIECE,
        "part of X A B": PART,
        "all-reduce: X A B": COPY,
    }
    rows = [
        [INPUT, one.columns, one.hidden, one.rows, one.part, one.result] for one in products
    ]
    return matrices(kinds, rows)


def placement_picture(held: Sequence[Mapping[str, torch.Tensor]]) -> Drawing:
    """Draw what each rank holds of some distributed tensors, titled by their placements."""
    known = {"Replicate": COPY, "Shard": PIECE, "Partial": PART}
    kinds = {
        title: next(kind for name, kind in known.items() if name in title)
        for title in held[0]
    }
    return matrices(kinds, [list(one.values()) for one in held])


def matrices(kinds: Mapping[str, str], rows: Sequence[Sequence[torch.Tensor]]) -> Drawing:
    """Draw a row of matrices per rank; `kinds` are the titles and what each of them is."""
    tall = [max(matrix.shape[0] for matrix in row) for row in rows]
    wide = [
        max(
            SIDE * max(matrix.shape[1] for matrix in column),
            8.2 * max(map(len, title.split(": "))),
        )
        for title, column in zip(kinds, zip(*rows, strict=True), strict=True)
    ]
    height = TOP + sum(SIDE * count + GAP for count in tall) + 24
    lines = [
        f"rank {rank}: "
        + "; ".join(f"{t} {m.tolist()}" for t, m in zip(kinds, row, strict=True))
        for rank, row in enumerate(rows)
    ]
    width = LEFT + sum(wide) + GAP * len(wide)
    drawing = Drawing(
        width, height, "\n".join(lines), "What each rank holds: " + ", ".join(kinds)
    )
    x = LEFT
    for number, title in enumerate(kinds):
        for i, line in enumerate(title.split(": ")):
            drawing.label(x + wide[number] / 2, 20 + 18 * i, line, 13, weight="bold")
        x += wide[number] + GAP
    y = TOP
    for rank, row in enumerate(rows):
        middle = y + SIDE * tall[rank] / 2
        drawing.label(10, middle + 5, f"rank {rank}", 14, tone(rank).text, "start", "bold")
        x = LEFT
        for number, (kind, matrix) in enumerate(zip(kinds.values(), row, strict=True)):
            left = x + (wide[number] - SIDE * matrix.shape[1]) / 2
            _matrix(drawing, left, middle - SIDE * matrix.shape[0] / 2, matrix, rank, kind)
            x += wide[number] + GAP
        y += SIDE * tall[rank] + GAP
    legend = "grey: the same on every rank · filled: only here · dashed: a part of a sum"
    drawing.label(LEFT, height - 10, legend, 14, anchor="start")
    return drawing


def _matrix(
    drawing: Drawing, left: float, top: float, matrix: torch.Tensor, rank: int, kind: str
) -> None:
    fill = {COPY: "#e4e4e4", PIECE: colour(rank), PART: "#ffffff"}[kind]
    edge = {COPY: FAINT, PIECE: INK, PART: colour(rank)}[kind]
    ink, dash = (tone(rank).on, "") if kind == PIECE else (INK, "4 3" if kind == PART else "")
    for i, line in enumerate(matrix.tolist()):
        for j, number in enumerate(line):
            x, y = left + SIDE * j, top + SIDE * i
            drawing.box(x + 1, y + 1, SIDE - 2, SIDE - 2, edge, fill, 1.5, dash, 3)
            drawing.label(x + SIDE / 2, y + SIDE / 2 + 5, number, 13, ink, weight="bold")


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
        gradients = whole_gradients(trainable.model).values()
        torch.optim.SGD(trainable.model.parameters(), lr=0.1).step()
        flat = torch.cat([gradient.flatten() for gradient in gradients])
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
    ways: tuple[Way, ...], ranks: int, reference: dict[str, torch.Tensor], **model: object
) -> dict[str, float]:
    """Launch `train` in float64; how far any parameter of any rank is from these."""
    results = launch(train_each, ranks, ways, dtype=torch.float64, **model).results
    return {
        name: largest_difference([mine[name] for mine in results], [reference] * ranks)
        for name in results[0]
    }


def train_each(
    rank: int, world_size: int, ways: tuple[Way, ...], **model: object
) -> dict[str, dict[str, torch.Tensor]]:
    """Train each way in the same ranks; the whole parameters of each."""
    return {name_of(way): train(rank, world_size, way, **model)[1] for way in ways}


def furthest_on_a_mesh(shape: tuple[int, int], reference: dict[str, torch.Tensor]) -> float:
    """Launch `train_on_a_mesh` in float64; how far any rank's parameters are from these."""
    ranks = shape[0] * shape[1]
    results = launch(train_on_a_mesh, ranks, shape, dtype=torch.float64).results
    return largest_difference(results, [reference] * ranks)


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
            trainable = way(new_model(depth=depth))
            loss_and_gradients(trainable)
            with span(f"{way.__name__} {depth}"):
                loss_and_gradients(trainable)


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
        trainable = way(new_model())
        loss_and_gradients(trainable)
        with CommDebugMode() as seen:
            loss_and_gradients(trainable)
        counts: Counter[str] = Counter()
        for operator, count in seen.get_comm_counts().items():
            counts[call_name(operator)] += count
        found[name_of(way)] = dict(counts)
    return found


def call_name(operator: object) -> str:
    """The collective's usual name; PyTorch has two sets of operators, named differently."""
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

    `model` are the arguments of a SmallTransformer, `batch` the sequences and their tokens.
    """
    trainable = {name: way(new_model(**model)) for name, way in ways.items()}
    tokens, targets = new_batch(0, *batch, model["vocabulary"])
    losses = {}

    def forward(name: str) -> None:
        one = trainable[name]
        with one.context():
            losses[name] = one.loss(one.model(tokens), targets)

    def backward(name: str) -> None:
        one = trainable[name]
        one.model.zero_grad()
        with one.context():
            losses.pop(name).backward()
        one.after_backward()

    actions = {
        (part, name): partial(part, name) for name in ways for part in (forward, backward)
    }
    seconds = in_turns(actions, steps, warm_up=2)
    return {
        name: list(zip(seconds[forward, name], seconds[backward, name], strict=True))
        for name in ways
    }


# Rounding: a sum of rounded numbers depends on its order. One process adds up the same
# products in pieces as t ranks would, but shares the features out at random: what differs is
# rounding. How far the gradients of many such runs lie from the plain run is the band in
# which a run on ranks must lie as well.

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class SummedMLP(nn.Module):
    """An MLP that adds up the parts of some groups of features, rounding after each."""

    def __init__(self, mlp: MLP, groups: list[torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.groups = mlp.up, mlp.down, groups

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = self.up, self.down
        parts = [
            linear(gelu(linear(x, up.weight[g], up.bias[g])), down.weight[:, g])
            for g in self.groups
        ]
        return sum(parts) + down.bias


class SummedAttention(nn.Module):
    """Attention that adds up the parts of some groups of heads, rounding after each."""

    def __init__(self, attention: Attention, groups: list[torch.Tensor]) -> None:
        super().__init__()
        self.query, self.key = attention.query, attention.key
        self.value, self.out = attention.value, attention.out
        self.per_head = attention.per_head
        columns = torch.arange(attention.query.out_features).view(-1, self.per_head)
        self.groups = [columns[heads].flatten() for heads in groups]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = []
        for g in self.groups:
            q, k, v = (
                linear(x, whole.weight[g]).unflatten(-1, (-1, self.per_head)).transpose(1, 2)
                for whole in (self.query, self.key, self.value)
            )
            mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
            parts.append(linear(mixed.transpose(1, 2).flatten(-2), self.out.weight[:, g]))
        return sum(parts)


class ReorderedHead(nn.Module):
    """A head whose tokens are computed in groups, and put back in their order."""

    def __init__(self, head: nn.Linear, groups: list[torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.groups = head.weight, groups
        self.back = torch.cat(groups).argsort()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = torch.cat([linear(x, self.weight[g]) for g in self.groups], -1)
        return logits[..., self.back]


def reordered(model: SmallTransformer, pieces: int, seed: int) -> Trainable:
    """The same model in one process, with its sums in pieces and in a random order."""
    generator = torch.Generator().manual_seed(seed)

    def share_out(many: int) -> list[torch.Tensor]:
        return list(torch.randperm(many, generator=generator).tensor_split(pieces))

    for block in model.blocks:
        heads = block.attention.query.out_features // block.attention.per_head
        block.attention = SummedAttention(block.attention, share_out(heads))
        block.mlp = SummedMLP(block.mlp, share_out(block.mlp.up.out_features))
    model.head = ReorderedHead(model.head, share_out(model.head.out_features))
    return Trainable(model, flat_cross_entropy)


def gradients(trainable: Trainable) -> torch.Tensor:
    """All gradients of the first batch side by side, as float64; the same on every rank."""
    loss_and_gradients(trainable)
    found = whole_gradients(trainable.model).values()
    return torch.cat([gradient.flatten() for gradient in found]).double()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """How long the difference is, in shares of what is expected."""
    return ((found - expected).norm() / expected.norm()).item()


class Runs(NamedTuple):
    """In one dtype: the gradients of the plain run, and how far off each random order is."""

    plain: torch.Tensor
    orders: list[float]


def band(
    rank: int, world_size: int, pieces: tuple[int, ...] = (2, 4), orders: int = 8
) -> dict[str, Runs]:
    """One process adds up in so many pieces, in as many random orders each, in each dtype."""
    found = {}
    for name, dtype in DTYPES.items():
        plain = gradients(whole(new_model(dtype)))
        runs = [
            gradients(reordered(new_model(dtype), count, seed))
            for count in pieces
            for seed in range(orders)
        ]
        found[name] = Runs(plain, [distance(run, plain) for run in runs])
    return found


def distances(
    rank: int, world_size: int, ways: dict[str, Way], plain: dict[str, torch.Tensor]
) -> dict[str, dict[str, float]]:
    """How far the gradients of each way lie from those of one process, in each dtype."""
    return {
        name: {
            dtype: distance(gradients(way(new_model(DTYPES[dtype]))), plain[dtype])
            for dtype in DTYPES
        }
        for name, way in ways.items()
    }


class Band(NamedTuple):
    """How far the random orders lie from one process, by dtype; and some ways, by name."""

    orders: dict[str, list[float]]
    ways: dict[str, dict[str, float]]

    def limit(self, dtype: str) -> float:
        """Beyond this it is no rounding: twice the farthest of the random orders."""
        return 2 * max(self.orders[dtype])


def verdicts(band: Band) -> Table:
    """One row per way: its distance in each dtype, and whether that is within rounding."""
    rows = [["the band ends at", *(f"{band.limit(dtype):.1e}" for dtype in band.orders)]]
    for name, found in band.ways.items():
        sides = ["inside" if off <= band.limit(d) else "outside" for d, off in found.items()]
        cells = zip(found.values(), sides, strict=True)
        rows.append([name, *(f"{off:.1e} {side}" for off, side in cells)])
    return Table(["gradients off", *band.orders], rows)


def measure_band(ways: dict[str, tuple[int, Way]]) -> Band:
    """Launch one process for the band, and each way on so many ranks."""
    runs = launch(band, 1).results[0]
    plain = {name: one.plain for name, one in runs.items()}
    found: dict[str, dict[str, float]] = {}
    for count in {ranks for ranks, _ in ways.values()}:
        same = {name: way for name, (ranks, way) in ways.items() if ranks == count}
        found |= launch(distances, count, same, plain).results[0]
    orders = {name: one.orders for name, one in runs.items()}
    return Band(orders, {name: found[name] for name in ways})


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
    hidden = {name: model.get_parameter(name).grad for name in FORGOTTEN}
    for name in FORGOTTEN:
        model.get_parameter(name).grad = None
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
