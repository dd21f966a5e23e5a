"""Only draws: what each rank holds of some matrices, and the band of rounding."""

from collections.abc import Mapping, Sequence

import torch

from mgpu_tutorial.lab.colours import COLOURS, colour, tone
from mgpu_tutorial.lab.draw.drawing import ALARM, FAINT, INK, Drawing
from mgpu_tutorial.lab.draw.plot import MARKERS, Plot
from mgpu_tutorial.tensor_parallel.product import Product
from mgpu_tutorial.tensor_parallel.product import X as INPUT
from mgpu_tutorial.tensor_parallel.rounding_measurements import Band

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
