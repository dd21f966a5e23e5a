"""Which parameter travels in which bucket: a row an iteration, a box a bucket."""

from collections.abc import Mapping, Sequence

from mgpu_tutorial.lab.draw.drawing import INK, Drawing
from mgpu_tutorial.lab.draw.sequence_chart import bytes_text

CELL, HEIGHT, ROW, TOP, GAP = 54, 40, 84, 12, 10


def bucket_map(
    rows: Mapping[str, Sequence[Sequence[str]]], nbytes: Mapping[str, int]
) -> Drawing:
    """Draw, for each named row, its buckets in the order in which they are sent.

    A row is a list of buckets, a bucket a list of parameter names, and `nbytes` the size of
    each parameter. Large parameters (weights) are dark, small ones (biases) light.
    """
    left = 20 + 7.5 * max(map(len, rows))
    widest = max(
        sum(map(len, buckets)) * CELL + len(buckets) * (GAP + 6) for buckets in rows.values()
    )
    text = "\n".join(_lines(rows, nbytes))
    alt = "Which parameter is in which bucket"
    drawing = Drawing(left + widest + 8, TOP + ROW * len(rows), text, alt)
    heavy = max(nbytes.values()) / 8
    for i, (name, buckets) in enumerate(rows.items()):
        y = TOP + ROW * i
        drawing.label(10, y + 46, name, 13, anchor="start", weight="bold")
        x = left
        for number, bucket in enumerate(buckets):
            x = _bucket(drawing, x, y, number, bucket, nbytes, heavy) + GAP
    return drawing


def _bucket(
    drawing: Drawing,
    x: float,
    y: float,
    number: int,
    bucket: Sequence[str],
    nbytes: Mapping[str, int],
    heavy: float,
) -> float:
    """Draw one bucket with its left edge at x; returns its right edge."""
    right = x + CELL * len(bucket) + 6
    total = bytes_text(sum(nbytes[name] for name in bucket))
    words = f"bucket {number}, {total}" if len(bucket) > 2 else f"{number}: {total}"
    drawing.label((x + right) / 2, y + 13, words, 12, weight="bold")
    drawing.box(x, y + 19, right - x, HEIGHT + 8, INK, "#ffffff", 2)
    for i, name in enumerate(bucket):
        dark = nbytes[name] >= heavy
        fill, ink = ("#5b5b5b", "#ffffff") if dark else ("#e4e4e4", INK)
        edge = x + 4 + CELL * i
        drawing.box(edge, y + 23, CELL - 2, HEIGHT, fill, fill, 1, radius=3)
        layer, _, kind = name.rpartition(".")
        drawing.label(edge + CELL / 2 - 1, y + 39, layer or kind, 11.5, ink)
        drawing.label(edge + CELL / 2 - 1, y + 54, kind if layer else "", 11.5, ink)
    return right


def _lines(
    rows: Mapping[str, Sequence[Sequence[str]]], nbytes: Mapping[str, int]
) -> list[str]:
    lines = []
    for name, buckets in rows.items():
        for number, bucket in enumerate(buckets):
            held = bytes_text(sum(nbytes[parameter] for parameter in bucket))
            lines.append(f"{name}, bucket {number} ({held}): {', '.join(bucket)}")
    return lines
