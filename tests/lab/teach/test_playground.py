"""The playground makes a real run for each setting, and stores the first one's result."""

import re

import ipywidgets as widgets
from IPython.display import display

from mgpu_tutorial.collectives import calls
from mgpu_tutorial.lab import Table, curves, launch, playground
from mgpu_tutorial.lab.draw.drawing import Drawing
from mgpu_tutorial.lab.widget import WIDGET_VIEW


def summed(ranks, op="SUM"):
    results = launch(calls.reduce_with, ranks, op).results
    return Table(["rank", op], [[rank, result] for rank, result in enumerate(results)])


def shown(value):
    picture = Drawing(40, 20, f"a drawing of {value}", "a drawing")
    plot = curves({"m": ([1, 2], [1, value])}, {}, "x", "y")
    return [picture, plot, f"<{value}>"]


def fail_at_two(value):
    if value == 2:
        raise ValueError("2 is <too much>\nand a second line")
    return f"it is {value}"


def test_each_move_is_a_run_of_its_own():
    play = playground(summed, ranks=[2, 3], op=["SUM", "MAX"])
    assert play.result.rows == [[0, 3.0], [1, 3.0]]
    play.controls["ranks"].value = 3
    assert play.result.rows == [[0, 6.0], [1, 6.0], [2, 6.0]]
    play.controls["op"].value = "MAX"
    assert play.result.rows[2] == [2, 3.0] and "MAX" in play.page.value
    assert "opacity" not in play.page.value


def test_it_says_that_it_computes_and_greys_out_what_is_old():
    pages = []

    def run(value):
        pages.append(play.page.value if pages else "")
        return f"it is {value}"

    play = playground(run, value=[1, 5])
    play.controls["value"].value = 5
    assert re.search(r"computing with value = 5 .*opacity.*it is 1", pages[1])


def test_numbers_are_a_slider_and_names_a_menu():
    named = {"one": 1, "two": [2]}
    play = playground(
        lambda a, b, c, d: (a, b, c, d), a=range(2, 4), b=named, c=[sum], d=[True]
    )
    kinds = {name: type(control) for name, control in play.controls.items()}
    menu = widgets.Dropdown
    assert kinds == {"a": widgets.SelectionSlider, "b": menu, "c": menu, "d": menu}
    assert [control.description for control in play.controls.values()] == list("abcd")
    assert play.setting() == "a = 2, b = one, c = sum, d = True"
    play.controls["b"].value = "two"
    assert play.result == (2, [2], sum, True)


def test_the_first_setting_is_the_first_choice_or_the_one_that_is_named():
    play = playground(lambda a, b: (a, b), first={"a": 70}, a=[7, 13, 70], b=[1, 2])
    assert play.result == (70, 1) and play.first == "a = 70, b = 1"
    assert play.controls["a"].options == (7, 13, 70)


def test_a_run_that_fails_leaves_one_line_and_the_next_one_works():
    play = playground(fail_at_two, value=[1, 2, 3])
    play.controls["value"].value = 2
    said, _, old = play.page.value.partition("<div")
    assert said.endswith(">value = 2</span> ValueError: 2 is &lt;too much&gt;")
    assert "opacity" in old and "it is 1" in old
    play.controls["value"].value = 3
    assert play.page.value == "<pre>&#x27;it is 3&#x27;</pre>"


def test_a_run_shows_nothing_outside_of_its_place(capsys):
    def run(value):
        print("printed")
        display({"text/plain": "displayed"}, raw=True)
        return str(value)

    play = playground(run, value=[1, 2])
    assert "printed" in capsys.readouterr().out
    play.controls["value"].value = 2
    assert capsys.readouterr() == ("", "") and "2" in play.page.value


def test_the_still_form_has_each_part_as_it_shows_itself():
    play = playground(shown, value=[1, 2])
    caption, drawing, plot, text = play.bundles()
    assert caption["text/plain"] == "with value = 1 (run this cell to get the controls)"
    assert drawing["text/plain"] == "a drawing of 1"
    assert "data:image/svg+xml;base64," in drawing["text/html"]
    # A picture of measured numbers is PNG only: its HTML would differ from run to run.
    assert "image/png" in plot and "text/html" not in plot
    assert text["text/plain"] == "'<1>'"
    assert all(WIDGET_VIEW in bundle for bundle in (caption, drawing, plot, text))
    assert "image/png" in play.page.value and "&lt;1&gt;" in play.page.value
