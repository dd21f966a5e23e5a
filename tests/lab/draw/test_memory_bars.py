"""The bars are as long as the bytes, and their text has every number."""

import torch
from matplotlib.axes import Axes

from mgpu_tutorial.lab import Ledger, memory_bars


def test_the_bars_stand_end_to_end_and_are_as_long_as_the_bytes(monkeypatch):
    ledger, drawn, barh = Ledger(), [], Axes.barh
    for name, count in (("outputs", 512), ("parameters", 256), ("gradients", 768)):
        ledger.add(name, torch.zeros(count))

    def record(axes, y, width, height, left, **style):
        drawn.append((y, left, width))
        return barh(axes, y, width, height, left, **style)

    monkeypatch.setattr(Axes, "barh", record)
    plot = memory_bars({"before": ledger, "after": ledger})
    assert drawn == [(0, 0, 1024), (0, 1024, 3072), (0, 4096, 2048)] * 2
    row = "cpu  6 KiB: parameters 1 KiB, gradients 3 KiB, outputs 2 KiB"
    assert repr(plot).splitlines() == ["before", row, "after", row]
