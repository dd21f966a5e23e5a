"""Which parameter travels in which bucket: a row per iteration, a box per bucket."""

from collections.abc import Mapping, Sequence

from mgpu_tutorial.lab.draw.drawing import INK, Drawing
from mgpu_tutorial.lab.words import bytes_text

CELL, HEIGHT, ROW, TOP, GAP, BORDER = 54, 40, 84, 12, 10, 3  # pixels


def bucket_map(
    rows: Mapping[str, Sequence[Sequence[str]]], nbytes: Mapping[str, int]
) -> Drawing:
    """Draw, for each named row, its buckets in the order in which they are sent.

    A row is a list of buckets, a bucket a list of parameter names, and `nbytes` the bytes of
    each parameter. Large parameters (weights) are dark, small ones (biases) light.
    """
    left = 20 + 7.5 * max(map(len, rows))
    widest = max(sum(_width(bucket) + GAP for bucket in buckets) for buckets in rows.values())
    text = "\n".join(_as_text(rows, nbytes))
    alt = "Which parameter is in which bucket"
    drawing = Drawing(left + widest + 8, TOP + ROW * len(rows), text, alt)
    for i, (name, buckets) in enumerate(rows.items()):
        y = TOP + ROW * i
        drawing.label(10, y + 46, name, 13, anchor="start", weight="bold")
        x = left
        for number, bucket in enumerate(buckets):
            total = bytes_text(sum(nbytes[parameter] for parameter in bucket))
            title = f"bucket {number}, {total}" if len(bucket) > 2 else f"{number}: {total}"
            drawing.label(x + _width(bucket) / 2, y + 13, title, 13, weight="bold")
            drawing.box(x, y + 19, _width(bucket), HEIGHT + 8, INK, "#ffffff", 2)
            _draw_parameters(drawing, x + BORDER + 1, y + 23, bucket, nbytes)
            x += _width(bucket) + GAP
    return drawing


def _width(bucket: Sequence[str]) -> int:
    return CELL * len(bucket) + 2 * BORDER


def _draw_parameters(
    drawing: Drawing,
    left: float,
    top: float,
    bucket: Sequence[str],
    nbytes: Mapping[str, int],
) -> None:
    large = max(nbytes.values()) / 8
    for i, name in enumerate(bucket):
        fill, ink = ("#5b5b5b", "#ffffff") if nbytes[name] >= large else ("#e4e4e4", INK)
        x = left + CELL * i
        drawing.box(x, top, CELL - 2, HEIGHT, fill, fill, 1, radius=3)
        layer, _, kind = name.rpartition(".")
        drawing.label(x + CELL / 2 - 1, top + 16, layer or kind, 14, ink)
        drawing.label(x + CELL / 2 - 1, top + 31, kind if layer else "", 14, ink)


def _as_text(
    rows: Mapping[str, Sequence[Sequence[str]]], nbytes: Mapping[str, int]
) -> list[str]:
    lines = []
    for name, buckets in rows.items():
        for number, bucket in enumerate(buckets):
            total = bytes_text(sum(nbytes[parameter] for parameter in bucket))
            lines.append(f"{name}, bucket {number} ({total}): {', '.join(bucket)}")
    return lines
