"""The picture of the notebook on data partitioning: which rank has which sample."""

from collections.abc import Mapping, Sequence

from mgpu_tutorial.lab.colours import tone
from mgpu_tutorial.lab.draw.drawing import ALARM, FAINT, INK, Drawing

SIDE, ROW, TOP, LEFT = 34, 42, 34, 120


def ownership(rows: Mapping[str, Sequence[Sequence[int]]], samples: int) -> Drawing:
    """Draw which rank has each of `samples` samples, one row per name in `rows`.

    A row is a list with the samples of each rank. A cell has the colour and the number of
    its rank. A sample of no rank is an empty place; one that is taken more than once is
    split and outlined in red.
    """
    width, height = LEFT + SIDE * samples + 16, TOP + ROW * len(rows) + 8
    drawing, lines = Drawing(width, height, "", "Which rank has which sample"), []
    drawing.label(LEFT - 12, 24, "sample", 12, anchor="end")
    for sample in range(samples):
        drawing.label(LEFT + SIDE * (sample + 0.5), 24, sample, 12)
    for i, (name, parts) in enumerate(rows.items()):
        y = TOP + ROW * i
        drawing.label(LEFT - 12, y + 22, name, 13, anchor="end")
        owners = [[r for r, part in enumerate(parts) if s in part] for s in range(samples)]
        for sample, ranks in enumerate(owners):
            _cell(drawing, LEFT + SIDE * sample, y, ranks)
        lines.append(f"{name}: " + " ".join("+".join(map(str, o)) or "·" for o in owners))
    drawing.text = "\n".join(lines)
    return drawing


def _cell(drawing: Drawing, x: float, y: float, ranks: list[int]) -> None:
    if not ranks:
        drawing.box(x + 1, y, SIDE - 2, ROW - 10, FAINT, "#ffffff", 1, "3 3", 3)
        return
    width = (SIDE - 2) / len(ranks)
    for i, rank in enumerate(ranks):
        own, left = tone(rank), x + 1 + width * i
        drawing.box(left, y, width, ROW - 10, INK, own.fill, 1, radius=3)
        drawing.label(left + width / 2, y + 21, rank, 13, own.on, weight="bold")
    if len(ranks) > 1:
        drawing.box(x, y - 1, SIDE, ROW - 8, ALARM, "none", 3, radius=3)
