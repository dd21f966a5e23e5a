"""What cannot be split is refused in words, and what can be is right."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.model_parallel import micro_batches as mb
from mgpu_tutorial.model_parallel import ranks as workers
from mgpu_tutorial.model_parallel.split_resnet import ModelParallelResNet50, split
from mgpu_tutorial.shared import small_and_large as sizes

UNITS = dict.fromkeys(["conv1", "layer1", "layer2", "fc"])
TWO = [torch.device("meta")] * 2


def step_of(size, labels, micro):
    return lambda: mb.MicroBatchStep(linear_stages(2), batch(size)[0], labels, micro)


def resnet(devices, cuts=("layer3.0",)):
    def new():
        with torch.device("meta"):
            ModelParallelResNet50(devices, cuts=cuts)

    return new


def linear_stages(count):
    """Stages of one layer in float64, as a step wants them; each call draws the same."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4).double() for _ in range(count)]
    return SimpleNamespace(stages=layers, devices=[torch.device("cpu")] * count)


def batch(size):
    return torch.linspace(-1, 2, 4 * size).double().view(size, 4), torch.arange(size) % 4


@pytest.mark.parametrize(
    "call, words",
    [
        (step_of(6, batch(6)[1], 4), "6 samples .* 4 equal"),
        (step_of(6, batch(6)[1], 7), "6 samples .* 7 equal"),
        (lambda: split(UNITS, ["layer3"]), "layer1, layer2, fc.*'layer3'"),
        (resnet(TWO, ("layer3",)), "layer3.0.*'layer3'"),
        (resnet(TWO[:1]), None),
        (resnet(TWO * 2), None),
    ],
)
def test_it_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@given(some.sets(some.sampled_from(list(UNITS)[1:])))
def test_stages_begin_at_the_cuts_in_the_order_of_the_network(cuts):
    stages = split(UNITS, [*cuts])
    assert [name for stage in stages for name in stage] == list(UNITS)
    begins = [name for name in UNITS if name in cuts]
    assert [next(iter(stage)) for stage in stages] == ["conv1", *begins]


@given(some.integers(1, 12), some.integers(1, 4))
def test_equal_parts_are_the_batch_in_order(micro, each):
    inputs, targets = torch.arange(2 * micro * each).view(-1, 2), torch.arange(micro * each)
    parts = mb.equal_parts(inputs, targets, micro)
    assert len(parts) == micro
    for i, (x, y) in enumerate(parts):
        rows = slice(i * each, (i + 1) * each)
        assert torch.equal(x, inputs[rows]) and torch.equal(y, targets[rows])


def frozen_first(model):
    model.stages[0].requires_grad_(False)


def frozen_last(model):
    model.stages[1].requires_grad_(False)


def without_parameters(model):
    model.stages[0] = nn.Tanh()


def turned_over(model):
    model.stages[0] = nn.Sequential(model.stages[0], Turn(), Turn())


class Turn(nn.Module):
    def forward(self, x):
        return x.T


@pytest.mark.parametrize("micro", [1, 2, 8])
@pytest.mark.parametrize(
    "change", [frozen_first, frozen_last, without_parameters, turned_over]
)
def test_two_steps_leave_the_gradients_of_one_process(change, micro):
    found, one = linear_stages(2), linear_stages(2)
    for model in found, one:
        change(model)
    whole = nn.Sequential(*one.stages)
    for _ in range(2):
        mb.take_step(found, *batch(8), micro)
        cross_entropy(whole(batch(8)[0]), batch(8)[1]).backward()
    ours = [p.grad for stage in found.stages for p in stage.parameters()]
    torch.testing.assert_close(ours, [p.grad for p in whole.parameters()])


def test_a_step_lets_go_of_a_micro_batch_with_its_backward():
    step, kept = mb.MicroBatchStep(linear_stages(1), *batch(4), 2), []
    for task in mb.forward_stage, mb.backward_stage:
        for i in range(2):
            task(step, 0, i, None)
            kept.append([i for _, i in sorted(step.saved)])
    assert kept == [[0], [0, 1], [1], []]


@pytest.mark.parametrize("count", [1, 3])
def test_two_stages_are_for_two_ranks(refused, count):
    what = workers.train_split, 1, sizes.small, sizes.SMALL
    refused(count, ValueError(f"got {count}"), *what)
