"""Every word stands out from what is behind it: 4.5 to 1, as WCAG 2.1 AA asks."""

import re
from xml.etree import ElementTree

import pytest

from mgpu_tutorial.lab import sequence_chart
from mgpu_tutorial.lab.colours import NAMELESS, TONES, tone, tone_of
from mgpu_tutorial.lab.draw.drawing import ALARM, INK
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.lab.teach.source import PLATES
from mgpu_tutorial.lab.teach.verdict import OPEN, RIGHT, WRONG

WHITE = "#ffffff"
PAIRS = [
    *((own.text, WHITE) for own in (*TONES, NAMELESS)),
    *((own.on, own.fill) for own in (*TONES, NAMELESS)),
    *((ink, WHITE) for ink in (INK, ALARM, RIGHT, WRONG, OPEN)),
    *(re.findall(r"#\w{6}", look)[:2] for look in PLATES.values()),
]


def luminance(colour):
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(c * share for c, share in zip(linear, (0.2126, 0.7152, 0.0722), strict=True))


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("one, other", PAIRS)
def test_words_can_be_read(one, other):
    assert contrast(one, other) >= 4.5


def test_ranks_differ_as_fills_and_as_text():
    assert len({own.fill for own in TONES}) == len({own.text for own in TONES}) == 8
    assert tone(9) == tone_of("cuda:1") == TONES[1] and tone_of("here") == NAMELESS


def test_a_panel_has_no_coloured_words():
    page = Report(2, stdout=["", ""], stderr=["", ""])._repr_html_()
    assert "<b>rank 1</b>" in page and tone(1).fill in page
    assert not re.search(r"[\";]color:(?!inherit)", page)  # there is a dark theme too


def behind(x, y, boxes):
    """What fills the last box that was drawn over a point."""
    for box in reversed(boxes):
        left, top, w, h = (float(box.get(key, 0)) for key in ("x", "y", "width", "height"))
        if box.get("fill") != "none" and left <= x <= left + w and top <= y <= top + h:
            return box.get("fill")
    raise AssertionError("a word beside the paper")


def test_every_word_of_a_chart_stands_out():
    group, events = tuple(range(8)), [Event(0, 3, "recv", 5, peer=1)]
    for rank in group:
        events.append(Event(rank, 0, "note", 0, 0, note="holds 1"))
        op = "recv" if rank % 2 else "send"
        events.append(Event(rank, 1, op, 1, 2, peer=rank ^ 1, nbytes=4))
        events.append(Event(rank, 2, "all_reduce", 3, 4, group=group, nbytes=4))
    boxes, words = [], 0
    for element in ElementTree.fromstring(
        sequence_chart(Report(8, events=events)).svg()
    ).iter():
        if element.tag.endswith("rect"):
            boxes.append(element)
        elif element.tag.endswith("text"):
            words += 1
            x, y = float(element.get("x")), float(element.get("y")) - 4
            assert contrast(element.get("fill"), behind(x, y, boxes)) >= 4.5, element.text
    assert words
