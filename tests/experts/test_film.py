"""The film of the tokens' journey."""

import re

from mgpu_tutorial.experts import figures
from mgpu_tutorial.lab import film


def test_an_arrow_leaves_a_box_that_holds_its_token(ranks):
    arrows = 0
    for frame in film(ranks(4, figures.travel, trace=True)).frames:
        held = {}
        for rank, bricks in re.findall(r"rank (\d): (.*)", frame.text):
            for slot, brick in re.findall(r"((?:here )?\d) (\d+→e\d)", bricks):
                held[rank, slot] = brick
        moves = re.findall(r"  (.*) into (.*): rank (\d) → rank (\d)", frame.text)
        arrows += len(moves)
        for slot, into, source, target in moves:
            assert held[source, slot] == held[target, into]
    assert arrows == 6  # three tokens of rank 0 go, and come home
