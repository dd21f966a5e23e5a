"""The bars are as long as the bytes, and their text has every number."""

import pytest
import torch
from matplotlib.axes import Axes

from mgpu_tutorial.lab import Ledger, memory_bars

ROW = "cpu  6 KiB: parameters 1 KiB, gradients 3 KiB, outputs 2 KiB"


@pytest.fixture
def ledger():
    ledger = Ledger()
    for name, count in (("outputs", 512), ("parameters", 256), ("gradients", 768)):
        ledger.add(name, torch.zeros(count))
    return ledger


def test_the_bars_stand_end_to_end_and_are_as_long_as_the_bytes(monkeypatch, ledger):
    drawn, barh = [], Axes.barh

    def record(axes, y, width, height, left, **style):
        drawn.append((y, left, width))
        return barh(axes, y, width, height, left, **style)

    monkeypatch.setattr(Axes, "barh", record)
    plot = memory_bars({"before": ledger, "after": ledger})
    assert drawn == [(0, 0, 1024), (0, 1024, 3072), (0, 4096, 2048)] * 2
    assert repr(plot).splitlines() == ["before", ROW, "after", ROW]


def test_an_empty_ledger_is_not_drawn(ledger):
    with pytest.raises(ValueError, match="nothing is counted: use ledger.saved"):
        memory_bars({"full": ledger, "empty": Ledger()})
