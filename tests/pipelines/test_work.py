"""What flows through a pipeline: pauses as long as they should be, and parts of ResNet-50."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from mgpu_tutorial.model_parallel.resnet_cuts import UNITS
from mgpu_tutorial.pipelines.schedules import SCHEDULES, stages_on_rank
from mgpu_tutorial.pipelines.work import Pauses, ResNetStages
from mgpu_tutorial.shared.vision import torchvision


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_rank_pauses_as_long_in_every_schedule(monkeypatch, schedule, split):
    """Its stages share a forward of 1 s, and backwards of input and weights of 1 s each."""
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    work = Pauses(3, forward=1.0, split_backward=split)
    for rank in range(3):
        indices = stages_on_rank(schedule, rank, 3)
        forward, backward, weights = [], [], []
        for index in indices:
            module = work.module(index, 3 * len(indices))
            output = module(work.batch(2)[0])
            forward += pauses
            pauses.clear()
            output.sum().backward()
            backward += pauses
            pauses.clear()
            if module.dw_builder:
                module.dw_builder()()
            weights += pauses
            pauses.clear()
        seconds = [sum(forward), sum(backward), sum(weights)]
        assert seconds == pytest.approx([1, 1, 1] if split else [1, 2, 0])


def test_a_pausing_stage_is_a_linear_layer_and_a_relu():
    work = Pauses(2, forward=0.0, rows=3, width=5)
    inputs, targets = work.batch(4)
    assert list(inputs.shape) == [12, 5] and torch.equal(targets, torch.zeros(12, 5))
    assert all(work.shape(index, 2, 4) == [3, 5] for index in range(3))
    torch.manual_seed(1)
    layer = torch.nn.Linear(5, 5)
    output = work.module(1, 2)(inputs)
    torch.testing.assert_close(output, torch.relu(inputs @ layer.weight.T + layer.bias))
    assert work.loss(output, targets).item() == pytest.approx(output.square().mean().item())
    assert torch.equal(work.batch(4)[0], inputs) and inputs.std() > 0.5


@given(per_stage=some.integers(1, 4), count=some.integers(1, 4), rest=some.integers(0, 3))
def test_cuts_are_joined_to_equally_many_units_a_stage(per_stage, count, rest):
    cuts = UNITS[1 : per_stage * count + rest]
    if (len(cuts) + 1) % count:
        with pytest.raises(ValueError, match=f"cannot be joined to {count} stages"):
            ResNetStages(cuts).cuts_for(count)
        return
    each = (len(cuts) + 1) // count
    assert list(ResNetStages(cuts).cuts_for(count)) == [
        UNITS[each * i] for i in range(1, count)
    ]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_stage_turns_the_shape_before_it_into_the_next(count):
    with torch.device("meta"):
        model = torchvision.models.resnet50()
        work = ResNetStages(("layer2.0", "layer3.0", "fc"), 4, 32, model)
        for index in range(count):
            output = work.module(index, count)(torch.empty(work.shape(index, count, 2)))
            assert list(output.shape) == work.shape(index + 1, count, 2)
    assert work.shape(0, count, 2) == [2, 3, 32, 32]
    images, labels = work.batch(2)
    assert list(images.shape) == [4, 3, 32, 32] and list(labels.shape) == [4]
    logits = torch.randn(4, 1000)
    chosen = torch.log_softmax(logits, 1)[range(4), labels]
    assert work.loss(logits, labels).item() == pytest.approx(-chosen.mean().item())
