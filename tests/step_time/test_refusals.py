"""Rows that tell no number are refused in one sentence."""

import pytest

from mgpu_tutorial.step_time import published

RUN = published.runs_of("Megatron 2021, table 2")[0]


def test_a_unit_that_nobody_knows_is_not_taken_for_another():
    with pytest.raises(ValueError, match="unit .*'TFLOP/s'"):
        published.fit_gpu([RUN._replace(unit="TFLOP/s")], 2.97)


def test_the_same_run_twice_tells_one_number():
    with pytest.raises(ValueError, match="1 run.* 2 numbers"):
        published.fit_gpu([RUN, RUN])


@pytest.mark.parametrize("share", [0.3, 0.2, 0.01])
def test_a_fit_below_nothing_warns_too(share):
    """The messages alone take longer than this step, so the products would have to take less
    than no time: the share of the peak comes out negative."""
    measured = RUN._replace(published=share * RUN.seconds, unit="s")
    with pytest.warns(UserWarning, match="or less than none: is this the plan"):
        published.fit_gpu([measured], 2.97)
