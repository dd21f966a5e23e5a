"""Every word of every stored drawing can be read on what lies behind it, in the dark too.

In a dark theme a filter turns a drawing round (custom.css, page.html); here it is computed.
"""

import base64
import re
from pathlib import Path
from xml.etree import ElementTree

import nbformat
import pytest

from tests.lab.test_colours import contrast

ROOT = Path(__file__).parent.parent.parent.parent
PATHS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
INSIDE = re.compile(r"data:image/svg\+xml;base64,([\w+/=]+)")
FILTER = "invert(0.9) hue-rotate(180deg)"
SHARES = 0.213, 0.715, 0.072  # of red, green and blue, in CSS's hue-rotate
LEAST = 4.5  # WCAG 2.1 AA


def in_the_dark(colour):
    """What FILTER makes of a colour: invert it by 90 %, and turn its hue by half a circle."""
    inverted = [0.9 - 0.8 * int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    grey = sum(share * value for share, value in zip(SHARES, inverted, strict=True))
    turned = (min(max(2 * grey - value, 0), 1) for value in inverted)
    return "#" + "".join(f"{round(255 * value):02x}" for value in turned)


def words_on(svg):
    """Each text with its colour and that of what is under it: its halo, or the last box."""
    root = ElementTree.fromstring(svg)
    frames = [group for group in root.iter() if group.get("class", "").startswith("f")]
    inside = {element for frame in frames for element in frame.iter()}
    always = [element for element in root.iter() if element not in inside]
    for frame in frames or [[]]:
        found, boxes = [], []
        for element in [*always, *(frame.iter() if frames else ())]:
            tag = element.tag.rpartition("}")[2]
            if tag == "rect" and element.get("fill") != "none":
                x, y, wide, high = (
                    float(element.get(n, 0)) for n in ("x", "y", "width", "height")
                )
                fill = element.get("fill")
                boxes.append((x, y, x + wide, y + high, fill))
                if len(fill) > 7:  # a veil: what is under it is over, and pale
                    found, boxes = [], boxes[:-1]
            elif tag == "text":
                x, y, size = (float(element.get(n)) for n in ("x", "y", "font-size"))
                under = [
                    fill
                    for left, top, right, bottom, fill in boxes
                    if left <= x <= right and top <= y - size / 3 <= bottom
                ]
                behind = element.get("stroke") or (under or ["#ffffff"])[-1]
                found.append((element.text, element.get("fill"), behind))
        yield from found


def drawings(path):
    for cell in nbformat.read(path, as_version=4).cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            yield data.get("image/svg+xml", "")
            for inside in INSIDE.findall(data.get("text/html", "")):
                yield base64.b64decode(inside).decode()


def drawings_of_the_readme(path):
    yield re.sub("<style.*?</style>", "", path.read_text("utf-8"))


@pytest.mark.parametrize(
    "path", [*PATHS, *(ROOT / "docs").glob("*.svg")], ids=lambda p: p.stem
)
def test_words_in_drawings_can_be_read_in_both_themes(path):
    faint = set()
    of = drawings if path in PATHS else drawings_of_the_readme
    for svg in set(filter(None, of(path))):
        for text, ink, behind in words_on(svg):
            for pair in (ink, behind), tuple(map(in_the_dark, (ink, behind))):
                if contrast(*pair) < LEAST:
                    faint.add((text, ink, behind, round(contrast(*pair), 2)))
    assert not faint


def test_the_filter_is_the_one_that_pages_and_the_lab_use():
    for name in "handouts/page.html", "tools/jupyterlab_settings/custom.css":
        assert FILTER in (ROOT / name).read_text("utf-8")
