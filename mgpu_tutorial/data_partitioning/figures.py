"""The picture of the notebook on data partitioning: which rank has which sample."""

from collections.abc import Mapping, Sequence

from mgpu_tutorial.lab.colours import tone
from mgpu_tutorial.lab.draw.drawing import ALARM, FAINT, INK, PAPER, Drawing

SIDE, ROW, HEIGHT, TOP, LEFT = 34, 42, 32, 34, 120  # pixels


def ownership(rows: Mapping[str, Sequence[Sequence[int]]], samples: int) -> Drawing:
    """Draw which rank has each of `samples` samples, one row per name in `rows`.

    A row is a list with the samples of each rank. A sample of no rank is an empty place, and
    one of several ranks is split and outlined in red.
    """
    width, height = LEFT + SIDE * samples + 16, TOP + ROW * len(rows) + 8
    drawing = Drawing(width, height, "", "Which rank has which sample")
    drawing.label(LEFT - 12, 24, "sample", 12, anchor="end")
    for sample in range(samples):
        drawing.label(LEFT + SIDE * (sample + 0.5), 24, sample, 12)
    for y, (name, parts) in zip(range(TOP, height, ROW), rows.items(), strict=False):
        drawing.label(LEFT - 12, y + 22, name, 13, anchor="end")
        drawing.text += f"\n{name}:"
        for sample in range(samples):
            ranks = [rank for rank, part in enumerate(parts) if sample in part]
            drawing.text += " " + ("+".join(map(str, ranks)) or "·")
            x, wide = LEFT + SIDE * sample + 1, (SIDE - 2) / max(1, len(ranks))
            drawing.box(x, y, SIDE - 2, HEIGHT, FAINT, PAPER, 1, "3 3", 3)
            for i, rank in enumerate(ranks):
                drawing.box(x + wide * i, y, wide, HEIGHT, INK, tone(rank).fill, 1, radius=3)
                middle, ink = x + wide * (i + 0.5), tone(rank).on
                drawing.label(middle, y + 21, rank, 13, ink, weight="bold")
            if len(ranks) > 1:
                drawing.box(x - 1, y - 1, SIDE, HEIGHT + 2, ALARM, "none", 3, radius=3)
    drawing.text = drawing.text.strip()
    return drawing
