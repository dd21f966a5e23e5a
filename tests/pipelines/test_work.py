"""What flows through a pipeline: pauses as long as they should be, and parts of ResNet-50."""

import time

import pytest

from mgpu_tutorial.pipelines.work import Pauses, ResNetStages


@pytest.mark.parametrize("per_rank", [1, 2])
def test_the_stages_of_a_rank_share_its_pauses(monkeypatch, per_rank):
    """A forward of 1 s, and a backward of 2 s."""
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    work = Pauses(3, forward=1.0)
    work.module(0, 3 * per_rank)(work.batch(2)[0]).sum().backward()
    assert [per_rank * pause for pause in pauses] == [1, 2]


@pytest.mark.slow
def test_a_stage_turns_the_shape_before_it_into_the_next():
    work = ResNetStages()
    x = work.batch(2)[0].chunk(2)[0]
    for index in range(2):
        assert list(x.shape) == work.shape(index, 2, 2)
        x = work.module(index, 2)(x)
    assert list(x.shape) == work.shape(2, 2, 2) == [2, 1000]
