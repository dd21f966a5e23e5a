"""What flows through a pipeline: pauses as long as they should be."""

import time

import pytest

from mgpu_tutorial.pipelines.work import Pauses


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
