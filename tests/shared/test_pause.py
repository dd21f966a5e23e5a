"""A pause changes no number and waits where it was told to."""

import time

import torch

from mgpu_tutorial.shared.pause import Pause


def test_a_pause_returns_values_and_gradients_unchanged():
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    y = Pause.apply(x, 0.0, 0.0)
    (y * torch.tensor([3.0, 5.0])).sum().backward()
    assert y.tolist() == [1.0, -2.0] and x.grad.tolist() == [3.0, 5.0]


def test_forward_and_backward_wait_their_own_times(monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    y = Pause.apply(torch.ones(1, requires_grad=True), 0.25, 0.5)
    assert slept == [0.25]
    y.backward()
    assert slept == [0.25, 0.5]
