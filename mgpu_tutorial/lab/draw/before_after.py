"""Before and after: what every rank holds, cell by cell, on both sides of a collective."""

import textwrap
from collections.abc import Sequence

import torch

from mgpu_tutorial.lab.colours import tone
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.record.report import Report

SIDE, HEIGHT, ROW, TOP, LEFT = 38, 22, 25, 24, 66
ARROW, MARGIN, LINE, LETTERS = 116, 10, 18, 38


def before_after(
    report: Report, name: str, words: Sequence[str] = (), words_at: float = 0
) -> Drawing:
    """Draw what each rank held, of a launch whose worker returns (before, after).

    Each of the two is a flat list of numbers, a tensor, a list of tensors, or None, which
    draws empty places. A value that some rank alone held before keeps the colour of that
    rank wherever it turns up later; a value made of several is grey. `words` stand beside
    the picture, a paragraph each, the first in bold, `words_at` pixels from the left if the
    picture is not wider.
    """
    before = _columns([result[0] for result in report.results])
    after = _columns([result[1] for result in report.results])
    owners = _owners(before)
    middle = LEFT + SIDE * len(before[0])
    right = middle + ARROW
    width = right + SIDE * len(after[0]) + MARGIN
    beside = max(width + MARGIN, words_at)
    if words:
        width = beside + 8 * LETTERS
    height = TOP + ROW * report.world_size
    text = "\n".join(
        f"rank {r}  {_as_text(before[r])} → {_as_text(after[r])}"
        for r in range(report.world_size)
    )
    text = "\n".join([*words, text])
    drawing = Drawing(width, height, text, f"{name}: what each rank holds before and after")
    drawing.label(LEFT, 17, "before", 14, anchor="start")
    drawing.label(right, 17, "after", 14, anchor="start")
    for rank in range(report.world_size):
        y = TOP + ROW * rank
        drawing.label(8, y + 16, f"rank {rank}", 14, tone(rank).text, "start", "bold")
        _draw_cells(drawing, LEFT, y, before[rank], owners)
        line = y + HEIGHT / 2
        drawing.line(middle + 4, line, right - 8, line, arrow=True)
        _draw_cells(drawing, right, y, after[rank], owners)
    drawing.label((middle + right) / 2 - 2, 17, name, 13)
    _write(drawing, words, beside)
    return drawing


def _columns(sides: Sequence) -> list[list]:
    """Each rank's values as a list, all of one length where some are None."""
    lists = [None if side is None else _values(side) for side in sides]
    longest = max(len(values) for values in lists if values is not None)
    return [[None] * longest if values is None else values for values in lists]


def _values(held: torch.Tensor | Sequence) -> list:
    """The numbers of a tensor, of a list of tensors, or of a list of numbers."""
    if isinstance(held, torch.Tensor):
        return held.flatten().tolist()
    return [v for part in held for v in (_values(part) if torch.is_tensor(part) else [part])]


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
        fill, ink = ("#d9d9d9", INK) if owner is None else (tone(owner).fill, tone(owner).on)
        drawing.box(left, y, SIDE - 4, HEIGHT, INK, fill, 1)
        drawing.label(left + SIDE / 2 - 2, y + 16, _value_text(value), 14, ink, weight="bold")


def _write(drawing: Drawing, words: Sequence[str], x: float) -> None:
    """The paragraphs beside the picture, wrapped."""
    y = TOP + 16
    for number, paragraph in enumerate(words):
        for line in textwrap.wrap(paragraph, LETTERS):
            weight = "normal" if number else "bold"
            drawing.label(x, y, line, 14, anchor="start", weight=weight)
            y += LINE
        y += 6


def _value_text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _as_text(values: Sequence) -> str:
    return (
        "["
        + ", ".join("·" if value is None else _value_text(value) for value in values)
        + "]"
    )
