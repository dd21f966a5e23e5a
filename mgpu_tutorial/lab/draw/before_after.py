"""Before and after: what every rank holds, cell by cell, on both sides of a collective."""

from collections.abc import Sequence

from mgpu_tutorial.lab.colours import colour
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.record.report import Report

SIDE, HEIGHT, TOP = 46, 30, 36


def before_after(report: Report, name: str) -> Drawing:
    """Draw the values of a launch whose worker returns (before, after), two flat lists.

    A value that some rank alone held before keeps the colour of that rank wherever it
    turns up later; a value made of several is grey. "None" draws an empty place.
    """
    before = [list(result[0]) for result in report.results]
    after = [list(result[1]) for result in report.results]
    owners = _owners(before)
    left = 90
    middle = left + SIDE * max(map(len, before)) + 40
    right = middle + 70
    width = right + SIDE * max(map(len, after)) + 20
    height = TOP + (HEIGHT + 10) * report.world_size + 6
    text = "\n".join(
        f"rank {r}  {_as_text(before[r])} → {_as_text(after[r])}"
        for r in range(report.world_size)
    )
    drawing = Drawing(width, height, text, f"{name}: what each rank holds before and after")
    drawing.label(left, 22, "before", 13, anchor="start")
    drawing.label(right, 22, "after", 13, anchor="start")
    for rank in range(report.world_size):
        y = TOP + (HEIGHT + 10) * rank
        drawing.label(14, y + 20, f"rank {rank}", 14, colour(rank), "start", "bold")
        _draw_cells(drawing, left, y, before[rank], owners)
        drawing.line(middle - 30, y + HEIGHT / 2, middle + 50, y + HEIGHT / 2, arrow=True)
        _draw_cells(drawing, right, y, after[rank], owners)
    drawing.label(middle + 8, TOP + HEIGHT / 2 - 6, name, 11)
    return drawing


def _owners(before: Sequence[Sequence]) -> dict:
    """The rank that alone held a value at the start, by value; none for shared values."""
    holders: dict = {}
    for rank, values in enumerate(before):
        for value in values:
            holders.setdefault(value, set()).add(rank)
    holders.pop(None, None)  # an empty place
    return {value: ranks.pop() for value, ranks in holders.items() if len(ranks) == 1}


def _draw_cells(drawing: Drawing, x: float, y: float, values: Sequence, owners: dict) -> None:
    for i, value in enumerate(values):
        left = x + SIDE * i
        if value is None:
            drawing.box(left, y, SIDE - 4, HEIGHT, FAINT, "#ffffff", 1, "3 3")
            continue
        owner = owners.get(value)
        fill = "#d9d9d9" if owner is None else colour(owner)
        drawing.box(left, y, SIDE - 4, HEIGHT, INK, fill, 1)
        ink = INK if owner is None else "#ffffff"
        drawing.label(left + SIDE / 2 - 2, y + 20, _value_text(value), 14, ink, weight="bold")


def _value_text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _as_text(values: Sequence) -> str:
    return (
        "["
        + ", ".join("·" if value is None else _value_text(value) for value in values)
        + "]"
    )
