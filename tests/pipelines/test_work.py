"""What flows through a pipeline: pauses as long as they should be, and parts of ResNet-50."""

import time

import pytest

from mgpu_tutorial.pipelines.work import Pauses, ResNetStages


@pytest.mark.parametrize("is_split, expected", [(False, [1, 2]), (True, [1, 1, 1])])
def test_a_backward_pauses_twice_as_long_as_a_forward(monkeypatch, is_split, expected):
    pauses = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    work = Pauses(1.0, is_split)
    stage = work.module(0)
    stage(work.batch(2)[0]).sum().backward()
    if is_split:
        stage.dw_builder()()
    assert pauses == expected


@pytest.mark.slow
def test_a_stage_turns_the_shape_before_it_into_the_next():
    work = ResNetStages()
    x = work.batch(2)[0].chunk(2)[0]
    for index in range(2):
        assert list(x.shape) == work.shape(index, 2)
        x = work.module(index)(x)
    assert list(x.shape) == work.shape(2, 2) == [2, 1000]
