"""Four virtual devices, and generated data."""

import pytest

from mgpu_tutorial.lab import devices


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("MGPU_DEVICE", "cpu")
    monkeypatch.delenv("MGPU_DATA", raising=False)


@pytest.fixture
def d():
    return devices(4)
