"""The playground makes a real run for each setting, and shows the first without widgets."""

import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display
from IPython.utils.capture import capture_output

from mgpu_tutorial.collectives import calls
from mgpu_tutorial.lab import Table, launch, playground

VIEW = "application/vnd.jupyter.widget-view+json"


def summed(ranks, op="SUM"):
    results = launch(calls.reduce_with, ranks, op).results
    return Table(["rank", op], [[rank, result] for rank, result in enumerate(results)])


def fail_at_two(value):
    print("printed")
    display({"text/plain": "displayed"}, raw=True)
    if value == 2:
        raise ValueError("2 is <too much>\nand a second line")
    return f"it is {value}"


@pytest.fixture
def shell():
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def shown(action, *given):
    """The outputs of an action, those that it updates among them."""
    with capture_output() as captured:
        action(*given)
    return captured.outputs


def test_each_move_is_a_run_of_its_own_in_the_place_of_the_old_one(shell):
    play = playground(summed, ranks=[2, 3], op=["SUM", "MAX"])
    caption, table = shown(play._ipython_display_)
    still = "with ranks = 2, op = SUM (run this cell to get the controls)"
    assert caption.data["text/plain"] == still and VIEW in caption.data
    assert "text/html" in table.data and play.result[0].rows == [[0, 3.0], [1, 3.0]]
    (updated,) = shown(lambda: setattr(play.controls["ranks"], "value", 3))
    assert updated.update and updated.transient == table.transient
    assert "6" in updated.data["text/plain"]
    shown(lambda: setattr(play.controls["op"], "value", "MAX"))
    assert play.result[0].rows[2] == [2, 3.0] and play.status.value == ""


def test_a_run_that_fails_leaves_one_line_and_the_old_result(capsys):
    play = playground(fail_at_two, value=[1, 2, 3])
    assert "printed" in capsys.readouterr().out
    play.controls["value"].value = 2
    assert play.status.value.endswith(">value = 2</span> ValueError: 2 is &lt;too much&gt;")
    assert play.result == ["it is 1"]
    play.controls["value"].value = 3
    assert play.status.value == "" and play.result == ["it is 3"]
    assert capsys.readouterr().out == ""  # nothing beside its place
