"""What lies where is what the tensors say, and what is new is told from what was there."""

import pytest
import torch
from torch import nn

from mgpu_tutorial.lab import device_table, devices, placement


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("MGPU_DEVICE", "cpu")


def test_things_of_one_name_are_numbered_and_a_single_one_is_not():
    pair = devices(2)
    pieces = [torch.zeros(2, 3, device=device) for device in pair]
    things = {
        "x": torch.zeros(()),
        "piece": pieces,
        "sum": pieces[:1],
        "net": nn.Linear(4, 2),
    }
    assert device_table(things).rows == [
        ["x", "cpu", "scalar"],
        ["piece 0", "virtual:0", "2×3"],
        ["piece 1", "virtual:1", "2×3"],
        ["sum", "virtual:0", "2×3"],
        ["net", "cpu", "10 numbers"],
    ]


def test_a_frame_marks_what_is_new():
    (device,) = devices(1)
    here, there = torch.zeros(2), torch.zeros(3, device=device)
    steps = [
        ("first", {"a": here}),
        ("second", {"a": here, "b": there}),
        ("third", {"b": there}),
        ("fourth", {"a": here, "b": there}),
    ]
    frames = placement(steps).frames
    assert [repr(frame).splitlines() for frame in frames] == [
        ["first", "  cpu: + a 2", "  virtual:0: nothing"],
        ["second", "  cpu: a 2", "  virtual:0: + b 3"],
        ["third", "  cpu: nothing", "  virtual:0: b 3"],
        ["fourth", "  cpu: + a 2", "  virtual:0: b 3"],  # gone, and there again
    ]
    thick = [frame.svg().count("stroke-width='2.4'") for frame in frames]
    assert thick == [1, 1, 0, 1]
    assert len({(frame.width, frame.height) for frame in frames}) == 1
