"""A film on the mesh of a plan: a box for each rank, a line for each message of a step."""

import textwrap

from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.draw.film import Film, Step, steps_of
from mgpu_tutorial.lab.record.report import Report

LINES = {  # of a dimension: its colour, width and dashes
    "tp": ("#C35000", 5, ""),
    "pp": ("#00825A", 2, "2 3"),
    "dp": ("#0072B2", 3, "7 4"),
}
WIDE, HIGH, ROWS = 98, 58, (118, 226)  # pixels: a box, and where the boxes of a stage begin
STAGES = (70, 84, "stage 1, on node 0"), (216, 322, "stage 2, on node 1")


def on_the_mesh(report: Report) -> Film:
    """What each rank of PP 2 · DP 2 · TP 2 holds, step by step, and who sends to whom.

    The stages lie below each other, the replicas side by side.
    """
    frames = [_frame(number, step) for number, step in enumerate(steps_of(report))]
    return Film(frames, still=len(frames) // 2 - 1)


def _corner(rank: int) -> tuple[float, float]:
    stage, column = divmod(rank, 4)
    return 10 + 118 * column + 8 * (column > 1), ROWS[stage]


def _frame(number: int, step: Step) -> Drawing:
    sent = {(source, target) for source, _, target, _ in step.moves}
    roads = {(min(pair), max(pair)) for pair in sent}
    used = {_dimension(*pair) for pair in roads}
    drawing = Drawing(480, 362, step.says, "")
    for i, line in enumerate(textwrap.wrap(step.says, 54)):
        drawing.label(8, 19 + 19 * i, line, 15, anchor="start")
    for replica in (0, 1):
        x = _corner(2 * replica)[0] + 107
        drawing.label(x, 62, f"replica {replica}", 14, weight="bold")
    for top, words, name in STAGES:
        drawing.box(3, top, 474, 116, FAINT, "none", 1)
        drawing.label(10, words + 3, name, 13, anchor="start")
    for one, other in sorted(roads):
        _road(drawing, one, other, sent)
    for rank, held in enumerate(step.held):
        x, y = _corner(rank)
        lit = [slot for each, slot in sorted(step.lit) if each == rank]
        drawing.box(x, y, WIDE, HIGH, INK, width=3.4 if lit else 1)
        shown = [f"{slot} {text}" for slot, (text, _) in held.items()]
        drawing.label(x + WIDE / 2, y + 17, f"rank {rank}", 13, weight="bold")
        for i, words in enumerate(dict.fromkeys([shown[0], shown[-1]])):
            drawing.label(x + WIDE / 2, y + 34 + 16 * i, words, 12)
        drawing.text += f"\n  rank {rank}: {', '.join(shown)}"
    for i, (name, (colour, width, dash)) in enumerate(LINES.items()):
        x, weight = 12 + 100 * i, "bold" if name in used else "normal"
        drawing.line(x, 349, x + 34, 349, colour, width, dash)
        drawing.label(x + 42, 353, name.upper(), 13, INK, "start", weight)
    for one, other in sorted(roads):
        ways = [f"{a} → {b}" for a, b in ((one, other), (other, one)) if (a, b) in sent]
        said = f"{_dimension(one, other).upper()}: {' and '.join(ways)}"
        drawing.text += f"\n  {said}"
    drawing.alt = f"Step {number}. {drawing.text}".replace("\n ", ";")
    return drawing


def _dimension(one: int, other: int) -> str:
    """Along which dimension of the mesh two ranks are neighbours."""
    return {1: "tp", 2: "dp", 4: "pp"}[other - one]


def _road(drawing: Drawing, one: int, other: int, sent: set[tuple[int, int]]) -> None:
    """A line between two boxes; with a head where only one of them sends."""
    name = _dimension(one, other)
    (x, y), (u, v), (colour, width, dash) = _corner(one), _corner(other), LINES[name]
    if name == "tp":
        drawing.line(x + WIDE, y + HIGH / 2, u, y + HIGH / 2, colour, width, dash)
    elif name == "pp":
        ends = (x + WIDE / 2, y + HIGH), (u + WIDE / 2, v)
        (a, b), (c, d) = ends if (one, other) in sent else reversed(ends)
        drawing.line(a, b, c, d, colour, width, dash, arrow=True)
    else:  # in an arc above the first stage, below the second
        edge, far = (y, y - 30) if y == ROWS[0] else (y + HIGH, y + HIGH + 30)
        x, u = x + WIDE / 2, u + WIDE / 2
        path = f"M{x:g} {edge:g} C{x + 40:g} {far:g} {u - 40:g} {far:g} {u:g} {edge:g}"
        style = f"stroke='{colour}' stroke-width='{width}' stroke-dasharray='{dash}'"
        drawing.parts.append(f"<path d='{path}' {style} fill='none'/>")
