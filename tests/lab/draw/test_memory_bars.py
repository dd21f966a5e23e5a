"""The bars are as long as the bytes, look different, and their text has every number."""

import pytest
import torch
from matplotlib.axes import Axes

from mgpu_tutorial.lab import Ledger, devices, memory_bars
from mgpu_tutorial.lab.draw.memory_bars import LOOKS, OTHERS, looks_of


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("MGPU_DEVICE", "cpu")


@pytest.fixture
def ledger():
    first, second = devices(2)
    ledger = Ledger()
    ledger.add("outputs", torch.zeros(512, device=first))
    ledger.add("parameters", torch.zeros(256, device=first))
    ledger.add("gradients", torch.zeros(768, device=first))
    ledger.add("parameters", torch.zeros(256, device=second))
    return ledger


def test_the_bars_stand_end_to_end_and_are_as_long_as_the_bytes(monkeypatch, ledger):
    drawn, barh = [], Axes.barh

    def record(axes, y, width, height, left, **style):
        drawn.append((y, left, width, style["hatch"], style["facecolor"]))
        return barh(axes, y, width, height, left, **style)

    monkeypatch.setattr(Axes, "barh", record)
    plot = memory_bars({"before": ledger, "after": ledger})
    looks = looks_of({"": ledger})
    assert list(looks) == ["parameters", "gradients", "outputs"]
    parameters, gradients, outputs = ((hatch, colour) for colour, hatch in looks.values())
    first = [
        (0, 0, 1024, *parameters),
        (0, 1024, 3072, *gradients),
        (0, 4096, 2048, *outputs),
    ]
    assert drawn == [*first, (1, 0, 1024, *parameters)] * 2
    assert plot.png.startswith(b"\x89PNG")


def test_the_text_has_every_number_and_is_the_same_each_time(ledger):
    text = repr(memory_bars({"before": ledger, "after": ledger}))
    rows = [
        "virtual:0  6 KiB: parameters 1 KiB, gradients 3 KiB, outputs 2 KiB",
        "virtual:1  1 KiB: parameters 1 KiB",
    ]
    assert text.splitlines() == ["before", *rows, "after", *rows]
    assert repr(memory_bars(ledger)).splitlines() == rows
    assert memory_bars(ledger).png == memory_bars(ledger).png


def test_categories_look_different_in_colour_and_in_grey():
    """Neighbours differ in hatch, or in brightness by a fifth of the range."""
    from matplotlib.colors import to_rgb

    looks = [*LOOKS.values(), *OTHERS]
    assert len(set(looks)) == len({colour for colour, _ in looks}) == len(looks)

    def brightness(colour):
        red, green, blue = to_rgb(colour)
        return 0.299 * red + 0.587 * green + 0.114 * blue

    for i, (colour, hatch) in enumerate(looks):
        for other, other_hatch in looks[:i]:
            apart = abs(brightness(colour) - brightness(other))
            assert hatch != other_hatch or apart > 0.2, (colour, other)


def test_a_usual_category_looks_the_same_in_every_picture():
    one, other = Ledger(), Ledger()
    one.add("gradients", torch.zeros(1))
    for name in ("inputs", "gradients", "parameters"):
        other.add(name, torch.zeros(1))
    assert looks_of({"": one})["gradients"] == looks_of({"": other})["gradients"]
    assert list(looks_of({"a": one, "b": other})) == ["parameters", "gradients", "inputs"]


def test_an_empty_ledger_is_not_drawn(ledger):
    with pytest.raises(ValueError, match="nothing is counted: use ledger.saved"):
        memory_bars({"full": ledger, "empty": Ledger()})
