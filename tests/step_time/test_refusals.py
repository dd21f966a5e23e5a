"""Numbers that no step and no benchmark has are refused in one sentence."""

import math

import pytest

from mgpu_tutorial.step_time import plain, published

NAN = math.nan


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: plain.bubble_only(153, 0, 384, 96), "a stage at least, and a micro-batch"),
        (lambda: plain.bubble_only(153, 12, 0, 96), "a stage at least, and a micro-batch"),
        (lambda: plain.bubble_only(153, 12, 384, 0.5), "a stage at least, and a micro-batch"),
        (lambda: plain.bubble_only(-153, 12, 384, 96), "and TFLOP/s above 0"),
        (lambda: plain.step_seconds(1, 1, 0, 0, 1, 0, 1), "a stage, a micro-batch"),
        (lambda: plain.step_seconds(1, 1, 0, 1, -2, 0, 1), "a stage, a micro-batch"),
        (lambda: plain.step_seconds(1, 0, 0, 1, 1, 0, 1), "rates above 0"),
        (lambda: plain.step_seconds(1, 1, 0, 1, 1, 0, 0), "rates above 0"),
        (lambda: plain.bubble_only(100, NAN, 8, 16), "a stage at least, and a micro-batch"),
        (lambda: plain.bubble_only(100, 4, 8, NAN), "a stage at least, and a micro-batch"),
        (lambda: plain.step_seconds(1, NAN, 0, 1, 1, 0, 1), "rates above 0"),
        (lambda: plain.step_seconds(-1e15, 1e14, 0, 4, 8, 1e9, 1e10), "are 0 or more"),
        (lambda: plain.step_seconds(1e15, 1e14, -1, 4, 8, 1e9, 1e10), "are 0 or more"),
        (lambda: plain.step_seconds(1e15, 1e14, 0, 4, 8, -1e12, 1e10), "are 0 or more"),
        (lambda: plain.step_seconds(1e15, 1e14, 0, 4, 8, NAN, 1e10), "are 0 or more"),
        (lambda: plain.bubble_only(153, 2.5, 384, 96), "in whole stages"),
        (lambda: plain.step_seconds(1, 1, 0, 1.5, 1, 0, 1), "whole numbers, got 1.5 and 1"),
        (lambda: plain.step_seconds(1, 1, 0, 1, 2.5, 0, 1), "whole numbers, got 1 and 2.5"),
        (lambda: plain.alpha_beta((1e3, 5e9), (1e6, 1e9), 8), "a latency below 0"),
        (lambda: plain.alpha_beta((1, 1), (2, 1.5), 2.5), "whole ranks, two or more"),
        (lambda: plain.alpha_beta((1, NAN), (2, 1.5), 2), "rates must be above 0"),
        (lambda: plain.alpha_beta((1, 1), (2, 1.5), 1), "whole ranks, two or more"),
        (lambda: plain.alpha_beta((1, 0), (2, 1.5), 2), "rates must be above 0"),
        (lambda: plain.alpha_beta((2, 1), (2, 1), 2), "must be larger, and take longer"),
        (lambda: plain.alpha_beta((2, 1), (4, 3), 2), "must be larger, and take longer"),
        (lambda: plain.alpha_beta((4, 3), (2, 1), 2), "must be larger, and take longer"),
    ],
)
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


RUN = published.runs_of("Megatron 2021, table 2")[0]


@pytest.mark.parametrize("seconds", [0, -3.0, float("nan")])
def test_no_step_takes_no_time(seconds):
    with pytest.raises(ValueError, match="is no measured step"):
        published.fit_gpu([RUN._replace(published=seconds, unit="s")], 2.97)


@pytest.mark.parametrize("unit", ["ms", "tflops", "TFLOP/s", "s, causal", None])
def test_a_unit_that_nobody_knows_is_not_taken_for_another(unit):
    with pytest.raises(ValueError, match="unit must be one of s; tokens/s; hardware TFLOP/s"):
        published.fit_gpu([RUN._replace(unit=unit)], 2.97)


@pytest.mark.parametrize("passes", [-3, NAN, math.inf])
def test_passes_that_cannot_be_are_refused(passes):
    with pytest.raises(ValueError, match="activation_passes are 0 or more, got"):
        published.fit_gpu([RUN], passes)


def test_the_same_run_twice_tells_one_number():
    with pytest.raises(ValueError, match="runs are too few to fit 2 numbers"):
        published.fit_gpu([RUN, RUN])


def test_a_null_guess_needs_a_measured_step():
    with pytest.raises(ValueError, match="needs a fitted row: give .run. of a measured step"):
        published.null_seconds(RUN, [])


@pytest.mark.parametrize("share", [0.3, 0.2, 0.01])
def test_a_fit_below_nothing_warns_too(share):
    """The messages alone take longer than this step, so the products would have to take less
    than no time: the share of the peak comes out negative."""
    measured = RUN._replace(published=share * RUN.seconds, unit="s")
    with pytest.warns(UserWarning, match="or less than none: is this the plan"):
        published.fit_gpu([measured], 2.97)
