"""What flows through a pipeline: pauses as long as they should be, and parts of ResNet-50."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from mgpu_tutorial.model_parallel.resnet_cuts import UNITS
from mgpu_tutorial.pipelines.work import Pauses, ResNetStages
from mgpu_tutorial.shared.vision import torchvision


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("per_rank", [1, 2])
def test_the_stages_of_a_rank_share_its_pauses(monkeypatch, per_rank, split):
    """A forward of 1 s, and backwards of the input and of the weights of 1 s each."""
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    work = Pauses(3, forward=1.0, split_backward=split)
    module = work.module(0, 3 * per_rank)
    output = module(work.batch(2)[0])
    output.sum().backward()
    if split:
        module.dw_builder()()
    expected = [1, 1, 1] if split else [1, 2]
    assert [per_rank * pause for pause in pauses] == pytest.approx(expected)


@given(per_stage=some.integers(1, 4), count=some.integers(1, 4), rest=some.integers(0, 3))
def test_cuts_are_joined_to_equally_many_units_a_stage(per_stage, count, rest):
    cuts = UNITS[1 : per_stage * count + rest]
    if (len(cuts) + 1) % count:
        with pytest.raises(ValueError, match=f"cannot be joined to {count} stages"):
            ResNetStages(cuts).cuts_for(count)
        return
    each = (len(cuts) + 1) // count
    joined = [UNITS[each * i] for i in range(1, count)]
    assert list(ResNetStages(cuts).cuts_for(count)) == joined


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_stage_turns_the_shape_before_it_into_the_next(count):
    with torch.device("meta"):
        model = torchvision.models.resnet50()
        work = ResNetStages(("layer2.0", "layer3.0", "fc"), 4, 32, model)
        for index in range(count):
            output = work.module(index, count)(torch.empty(work.shape(index, count, 2)))
            assert list(output.shape) == work.shape(index + 1, count, 2)
    assert work.shape(0, count, 2) == [2, 3, 32, 32]
