"""The film of the tokens' journey."""

import re

from mgpu_tutorial.experts import figures
from mgpu_tutorial.lab import film


def test_an_arrow_leaves_a_box_that_holds_its_token(ranks):
    arrows = 0
    for frame in film(ranks(4, figures.travel, trace=True)).frames:
        held = {}
        for rank, bricks in re.findall(r"rank (\d): (.*)", frame.text):
            for slot, brick in re.findall(r"((?:here )?\d) (\d+ e\d)", bricks):
                held[rank, slot] = brick
        moves = re.findall(r"  (.*) into (.*): rank (\d) → rank (\d)", frame.text)
        arrows += len(moves)
        for slot, into, source, target in moves:
            assert held[source, slot] == held[target, into]
    assert arrows == 6  # three tokens of rank 0 go, and come home


def numbers(kind, names, part):
    """The coordinates of a line or a box, if this part of a drawing is one."""
    if part.startswith(f"<{kind}"):
        return [float(re.search(rf" {name}='(.*?)'", part)[1]) for name in names]


def test_no_arrow_runs_through_a_box(ranks):
    for frame in film(ranks(4, figures.travel, trace=True)).frames:
        lines = [numbers("line", ("x1", "y1", "x2", "y2"), part) for part in frame.parts]
        boxes = [numbers("rect", ("x", "y", "width", "height"), part) for part in frame.parts]
        for x1, y1, x2, y2 in filter(None, lines):
            for i in range(1, 100):
                x, y = x1 + (x2 - x1) * i / 100, y1 + (y2 - y1) * i / 100
                for left, top, wide, high in filter(None, boxes):
                    inside = left < x < left + wide and top < y < top + high
                    assert not inside, (x, y)
