"""Virtual devices, generated data, and one core for each: threads of threads only wait."""

import pytest
import torch

from mgpu_tutorial.lab import devices


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("MGPU_DEVICE", "cpu")
    monkeypatch.delenv("MGPU_DATA", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def d():
    return devices(4)
