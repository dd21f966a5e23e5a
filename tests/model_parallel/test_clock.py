"""A step by the clock: one device after the other, forward and then back."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.model_parallel.clock import timed_step

IMAGES, LABELS = torch.linspace(-1, 2, 24).double().view(6, 4), torch.arange(6) % 4


def linear_stages(devices):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4).double() for _ in devices]
    return SimpleNamespace(stages=layers, devices=devices)


def test_the_stages_compute_one_after_the_other_and_back():
    tasks = timed_step(linear_stages([torch.device("cpu")] * 3), IMAGES, LABELS)
    assert [f"{t.kind}{t.stage}" for t in tasks] == ["F0", "F1", "F2", "B2", "B1", "B0"]
    assert all(t.begin <= t.end for t in tasks)
    assert all(a.end <= b.begin for a, b in zip(tasks, tasks[1:], strict=False))
    assert {t.row for t in tasks} == {0}  # one device


def test_the_gradients_are_those_of_the_whole_network():
    model, one = linear_stages(["cpu"] * 2), linear_stages(["cpu"] * 2)
    timed_step(model, IMAGES, LABELS)
    whole = nn.Sequential(*one.stages)
    cross_entropy(whole(IMAGES), LABELS).backward()
    found = [p.grad for stage in model.stages for p in stage.parameters()]
    assert all(map(torch.equal, found, [p.grad for p in whole.parameters()]))
