"""Micro-batches in one process: nothing is kept too long, and errors come out."""

import weakref
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from mgpu_tutorial.model_parallel import micro_batches


def linear_stages(count):
    """A model as a step wants it."""
    layers = [torch.nn.Linear(4, 4) for _ in range(count)]
    return SimpleNamespace(stages=layers, devices=[torch.device("cpu")] * count)


def batch(size):
    return torch.ones(size, 4), torch.zeros(size, dtype=torch.int64)


def test_what_a_backward_has_used_is_freed():
    """When a stage is at its backward i, nothing is left of the micro-batches before i."""
    model, alive = linear_stages(3), []
    outputs = {stage: [] for stage in model.stages}  # weak references

    def remember(stage, _, output):
        earlier = list(outputs[stage])
        outputs[stage].append(weakref.ref(output))
        output.register_hook(lambda _: alive.extend(one() is not None for one in earlier))

    for stage in model.stages:
        stage.register_forward_hook(remember)
    micro_batches.take_step(model, *batch(8), 4)
    assert alive == [False] * (3 * (1 + 2 + 3))


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_in_a_stage_comes_out_and_nothing_hangs(broken):
    model = linear_stages(2)
    model.stages[broken] = torch.nn.Linear(7, 7)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        micro_batches.take_step(model, *batch(8), 2)


def test_another_loss_is_an_argument():
    images, labels = torch.linspace(-1, 2, 24).double().view(6, 4), torch.arange(6) % 4
    smooth = partial(cross_entropy, label_smoothing=0.3)
    layer = torch.nn.Linear(4, 4).double()
    model = SimpleNamespace(stages=[layer], devices=[torch.device("cpu")])
    micro_batches.take_step(model, images, labels, 3, loss_of=smooth)
    (expected,) = torch.autograd.grad(smooth(layer(images), labels), layer.weight)
    assert (layer.weight.grad - expected).abs().max() < 1e-12
