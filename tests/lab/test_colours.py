"""Every word stands out from what is behind it: 4.5 to 1, as WCAG 2.1 AA asks."""

import pytest

from mgpu_tutorial.lab.colours import NAMELESS, TONES
from mgpu_tutorial.lab.draw.drawing import ALARM, INK
from mgpu_tutorial.lab.teach.verdict import OPEN, RIGHT, WRONG

WHITE = "#ffffff"
PAIRS = [
    *((own.text, WHITE) for own in (*TONES, NAMELESS)),
    *((own.on, own.fill) for own in (*TONES, NAMELESS)),
    *((ink, WHITE) for ink in (INK, ALARM, RIGHT, WRONG, OPEN)),
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
