"""A pause changes no number and waits where it was told to."""

import time

import torch

from mgpu_tutorial.shared.pause import Pause


def test_forward_and_backward_wait_their_own_times_and_change_no_number(monkeypatch):
    slept = []
    monkeypatch.setattr(time, "sleep", slept.append)
    x = torch.tensor([1.0, -2.0], requires_grad=True)
    y = Pause.apply(x, 0.25, 0.5)
    assert slept == [0.25] and y.tolist() == [1.0, -2.0]
    (y * torch.tensor([3.0, 5.0])).sum().backward()
    assert slept == [0.25, 0.5] and x.grad.tolist() == [3.0, 5.0]
