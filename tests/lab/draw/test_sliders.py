"""A page and JupyterLab show for each setting what the function draws; paper shows stills."""

import html
import json
import re
import shutil
import subprocess

import pytest

from handouts.convert import ROOM
from mgpu_tutorial.lab import sliders
from mgpu_tutorial.lab.draw.drawing import Drawing

LINKS = {"slow": 2, "fast < 10": 7}


def draw(ranks, the_link):
    says = f"{ranks} ranks < {ranks * the_link}"
    drawing = Drawing(300, 60, says, says)
    drawing.box(0, 0, 10 * ranks, 10)
    drawing.label(20, 40, f"{ranks * the_link} ><")
    return drawing


def moved():
    return sliders(
        draw, [(2, "fast < 10"), (1000, "slow")], ranks=[2, 4, 1000], the_link=LINKS
    )


def stored(shown):
    (data,) = re.findall(r'data-frames="([^"]*)"', shown._repr_mimebundle_()["text/html"])
    return json.loads(html.unescape(data))


def without_title(drawing):
    return re.sub("<title>.*?</title>", "", drawing.svg())


def test_a_page_has_the_frame_of_every_setting():
    data = stored(moved())
    assert [row["labels"] for row in data["sliders"]] == [["2", "4", "1,000"], list(LINKS)]
    assert [row["says"] for row in data["sliders"]] == ["ranks", "the link"]
    assert [row["at"] for row in data["sliders"]] == [0, 1]  # as in the first still
    drawn = [draw(ranks, link) for ranks in (2, 4, 1000) for link in LINKS.values()]
    for (says, parts), ours in zip(data["frames"], drawn, strict=True):
        assert says == ours.alt
        assert "".join(data["parts"][part] for part in parts) == without_title(ours)
    assert len(data["parts"]) == len(set(data["parts"]))


def test_the_script_of_a_page_finds_the_frame_of_the_setting():
    if not shutil.which("node"):
        pytest.skip("no node here: the pages' script is tried in a browser too")
    data, settings = stored(moved()), [[0, 0], [1, 1], [2, 0]]
    frames = f"{settings}.map((at) => sliders.frame({json.dumps(data)}, at))"
    script = (ROOM / "sliders.js").read_text(encoding="utf-8")
    script += f"console.log(JSON.stringify({frames}))"
    ran = subprocess.run(["node", "--eval", script], check=True, capture_output=True)
    ours = [draw(2, 2), draw(4, 7), draw(1000, 2)]
    found = [(each["says"], each["svg"]) for each in json.loads(ran.stdout)]
    assert found == [(drawing.alt, without_title(drawing)) for drawing in ours]


def test_in_jupyterlab_a_slider_changes_the_picture_and_its_words():
    first, second, picture, _ = moved().widget().children
    assert (first.description, first.label, second.label) == ("ranks", "2", "fast < 10")
    assert draw(2, 7).html() in picture.value
    first.label, second.label = "1,000", "slow"
    assert picture.value == f"{draw(1000, 2).html()}<p>1000 ranks &lt; 2000</p>"


def test_paper_has_the_stills_with_their_settings():
    page = moved()._repr_mimebundle_()["text/html"]
    assert page.count("<figure") == 2
    assert "<figcaption>ranks: 2, the link: fast &lt; 10</figcaption>" in page
    assert draw(1000, 2).html() in page
    assert repr(moved()).splitlines()[0] == "ranks: 2, the link: fast < 10"
    assert repr(moved()).splitlines()[-1] == "1000 ranks < 2000"


@pytest.mark.parametrize(
    ("stills", "choices", "words"),
    [
        ([(3,)], {"ranks": [2, 4]}, r"\(3,\) is no setting for paper: give one of each of "),
        ([(2, 4)], {"ranks": [2, 4]}, "is no setting"),
        ([], {"ranks": [2, 4]}, "is no setting"),
        ([(2,)], {"ranks": [2]}, "1 choices make 1 settings"),
        ([()], {}, "0 choices"),
        ([(0, 0)], {"a": range(20), "b": range(20)}, "make 400 settings, .* at most 200"),
    ],
)
def test_what_is_no_setting_is_refused(stills, choices, words):
    with pytest.raises(ValueError, match=words):
        sliders(draw, stills, **choices)
