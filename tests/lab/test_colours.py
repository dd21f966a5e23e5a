"""Every word stands out from what is behind it: 4.5 to 1, as WCAG 2.1 AA asks."""

import re
from itertools import product
from xml.etree import ElementTree

import pytest
import torch

from mgpu_tutorial.lab import before_after, bucket_map, cluster_map, ownership, sequence_chart
from mgpu_tutorial.lab.colours import COLOURS, NAMELESS, TONES, tone, tone_of
from mgpu_tutorial.lab.draw.drawing import ALARM, INK
from mgpu_tutorial.lab.draw.pipeline_chart import LOOKS, appearance
from mgpu_tutorial.lab.draw.placement import placement
from mgpu_tutorial.lab.record.pipeline_steps import Task
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.lab.teach.source import PLATES
from mgpu_tutorial.lab.teach.verdict import OPEN, RIGHT, WRONG
from mgpu_tutorial.tensor_parallel.figures import COPY, PART, PIECE, matrices

LEAST, WHITE = 4.5, "#ffffff"


def luminance(colour):
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(c * share for c, share in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_the_contrast_is_that_of_the_guidelines():
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("own", [*TONES, NAMELESS])
def test_a_tone_can_be_read_on_white_and_on_its_fill(own):
    assert contrast(own.text, WHITE) >= LEAST
    assert contrast(own.on, own.fill) >= LEAST


def test_ranks_differ_as_fills_and_as_text():
    assert len({own.fill for own in TONES}) == len({own.text for own in TONES}) == 8
    assert tone(9) == tone_of("cuda:1") == TONES[1] and tone_of("here") == NAMELESS
    assert COLOURS[1] == TONES[1].fill


@pytest.mark.parametrize("ink", [INK, ALARM])
def test_ink_and_alarm_can_be_read_on_white(ink):
    assert contrast(ink, WHITE) >= LEAST


@pytest.mark.parametrize("background", [RIGHT, WRONG, OPEN])
def test_a_verdict_can_be_read_on_its_plate(background):
    assert contrast(WHITE, background) >= LEAST


@pytest.mark.parametrize("look", list(PLATES.values()), ids=list(PLATES))
def test_a_change_can_be_read_on_its_plate(look):
    background, ink = re.match(r"background:(#\w{6});color:(#\w{6});", look).groups()
    assert contrast(background, ink) >= LEAST


@pytest.mark.parametrize("kind, row", [*product(LOOKS, range(8))])
def test_a_micro_batch_can_be_read_in_its_box(kind, row):
    face, ink, hatch = appearance(Task(row, row, kind, 0, 0.0, 1.0))
    assert contrast(face, ink) >= LEAST
    assert not hatch or contrast(WHITE, ink) >= LEAST  # its lines are white


def test_a_panel_has_no_coloured_words():
    page = Report(2, stdout=["", ""], stderr=["", ""])._repr_html_()
    assert "<b>rank 1</b>" in page and tone(1).fill in page
    assert not re.search(r"[\";]color:(?!inherit)", page)  # there is a dark theme too


def drawings():
    notes = [Event(r, 0, "note", 0, 0, note="holds 1") for r in range(8)]
    pairs = [
        Event(r, 1, *(("send", 1, 2) if r % 2 == 0 else ("recv", 1, 2)), peer=r ^ 1, nbytes=4)
        for r in range(8)
    ]
    group = tuple(range(8))
    calls = [Event(r, 2, "all_reduce", 3, 4, group=group, nbytes=4) for r in range(8)]
    lost = [Event(0, 3, "recv", 5, peer=1)]
    yield sequence_chart(Report(8, events=[*notes, *pairs, *calls, *lost]))
    yield before_after(Report(8, results=[([r], [9]) for r in range(8)]), "max", ["Words."])
    yield ownership({"once": [[r] for r in range(8)], "twice": [[0]] * 8}, samples=9)
    yield cluster_map(2, 4)
    yield bucket_map({"first": [["a.weight", "a.bias"]]}, {"a.weight": 4096, "a.bias": 16})
    yield placement([("one", {"x": torch.zeros(2)})]).frames[0]
    held = [[torch.ones(1, 1)] * 3 for _ in range(8)]
    yield matrices({"a": COPY, "b": PIECE, "c": PART}, held)


def behind(x, y, boxes):
    """What fills the last box that was drawn over a point."""
    for box in reversed(boxes):
        left, top, w, h = (float(box.get(key, 0)) for key in ("x", "y", "width", "height"))
        if box.get("fill") != "none" and left <= x <= left + w and top <= y <= top + h:
            return box.get("fill")
    raise AssertionError("a word beside the paper")


@pytest.mark.parametrize("drawing", [*drawings()], ids=lambda drawing: drawing.alt[:20])
def test_every_word_of_a_drawing_stands_out(drawing):
    boxes, words = [], 0
    for element in ElementTree.fromstring(drawing.svg()).iter():
        if element.tag.endswith("rect"):
            boxes.append(element)
        if element.tag.endswith("text") and element.text:
            words += 1
            x, y = float(element.get("x")), float(element.get("y")) - 4
            ink = element.get("fill")
            assert contrast(ink, behind(x, y, boxes)) >= LEAST, (element.text, ink)
    assert words
