"""Every ink of the pages can be read on every ground that it has, in light and in dark.

axe gives up where the ground is a gradient, as behind code and tables. So the colours are
taken from the style sheet: all that text may have, and all classes of pandoc's highlighter.
"""

import re
import subprocess

import pypandoc
import pytest

from handouts.convert import ROOM
from tests.lab.test_colours import contrast

LEAST = 4.5  # WCAG 2.1 AA
PAGE = (ROOM / "page.html").read_text("utf-8")
COLOURS = (ROOM / "colours.css").read_text("utf-8")
INKS = ("ink", "grey", "accent", "name", "text", "number", "alarm")
VARIABLES = re.compile(r"--([\w-]+): (#\w+)[;}]")
(light,), (dark,) = (re.findall(r":root \{(.*?)\}", css, re.S) for css in (COLOURS, PAGE))
THEMES = {
    "light": dict(VARIABLES.findall(light)),
    "dark": dict(VARIABLES.findall(light)) | dict(VARIABLES.findall(dark)),
}


def six(colour):
    return colour if len(colour) == 7 else "#" + "".join(2 * digit for digit in colour[1:4])


@pytest.mark.parametrize("theme", THEMES)
def test_every_ink_can_be_read_on_every_ground(theme):
    colours = {name: six(colour) for name, colour in THEMES[theme].items()}
    faint = {
        (ink, ground): round(contrast(colours[ink], colours[ground]), 2)
        for ground in ("paper", "pale", "alarm-paper")
        for ink in INKS
        if contrast(colours[ink], colours[ground]) < LEAST
    }
    assert not faint


def test_code_has_only_inks_of_the_page():
    """What pandoc colours by itself, the page colours again, later and as strongly."""
    assert "code span[class] { color: var(--ink); }" in COLOURS  # each class has a colour
    for page in (PAGE, (ROOM / "deck.html").read_text("utf-8")):
        assert "$highlighting-css$\n$colours.css()$" in page
    for selector, ink in re.findall(r"(code[^{}]*?) \{ color: ([^;]+);", COLOURS):
        assert re.fullmatch(rf"var\(--({'|'.join(INKS)})\)", ink), (selector, ink)
    command = [pypandoc.get_pandoc_path(), "-s", "-t", "html", "--metadata=title=T"]
    code = "~~~ python\nraise ValueError(f'{1:.2f}')\n~~~\n"
    done = subprocess.run(command, input=code, capture_output=True, encoding="utf-8")
    of_pandoc = re.findall(r"(code span\S*) \{[^}]*color", done.stdout)
    assert of_pandoc and all(re.fullmatch(r"code span\.\w\w", each) for each in of_pandoc)
