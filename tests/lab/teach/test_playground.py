"""The playground makes a real run for each setting, and shows the first without widgets."""

import ipywidgets
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.display import display
from IPython.utils.capture import capture_output

from mgpu_tutorial.collectives import calls
from mgpu_tutorial.lab import launch, playground

VIEW = "application/vnd.jupyter.widget-view+json"


def summed(ranks, plus):
    if plus == 2:
        display({"text/plain": "displayed"}, raw=True)
        raise ValueError("2 is <too much>\nand a second line")
    return plus + launch(calls.reduce_with, ranks, "SUM").results[0]


@pytest.fixture
def shell():
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()


def test_each_move_is_a_run_in_the_place_of_the_old_one_and_a_failure_is_one_line(
    shell, monkeypatch
):
    made, new = [], ipywidgets.SelectionSlider
    monkeypatch.setattr(
        ipywidgets, "SelectionSlider", lambda **how: made.append(new(**how)) or made[-1]
    )
    with capture_output() as shown:
        playground(summed, {"plus": 0}, ranks=[2, 3], plus=[1, 0, 2])
    caption, first = shown.outputs
    still = "with ranks = 2, plus = 0 (run this cell to get the controls)"
    assert caption.data["text/plain"] == still and VIEW in caption.data
    assert first.data["text/plain"] == "3.0"
    ranks, plus = made
    with capture_output() as shown:
        ranks.value = 3
    (updated,) = shown.outputs
    assert updated.update and updated.transient == first.transient
    assert updated.data["text/plain"] == "6.0"
    with capture_output() as shown:
        plus.value = 2
    assert shown.outputs == []  # nothing beside its place, and the old result stays
