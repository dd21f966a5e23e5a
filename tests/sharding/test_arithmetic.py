"""What a rank holds: the formula, and the count after a real step."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from mgpu_tutorial.sharding import arithmetic, figures, training

PARTS = ("parameters", "gradients", "optimizer")
FIRST_SHARDED = {"parameters": 3, "gradients": 2, "optimizer": 1}  # the stage


@given(some.integers(0, 3), some.integers(1, 64), some.integers(1, 10**6))
def test_a_stage_divides_what_it_shards_by_the_ranks(stage, ranks, parameters):
    found = arithmetic.held(parameters, ranks, stage)
    for name, nbytes in zip(PARTS, found, strict=True):
        whole = parameters * getattr(arithmetic.MIXED, name)
        assert nbytes == (whole / ranks if stage >= FIRST_SHARDED[name] else whole)


def test_both_recipes_are_sixteen_bytes():
    # bfloat16 twice; master weights and two moments in float32
    assert arithmetic.MIXED == (2, 2, 12)
    assert arithmetic.FLOAT32 == (4, 4, 8)


@pytest.mark.parametrize("stage", arithmetic.STAGE_NAMES)
def test_the_ledger_counts_what_the_formula_says(ranks, stage):
    expected = arithmetic.held(29_312, 2, stage, arithmetic.FLOAT32)
    report = ranks(2, figures.count_state, training.PREPARE[stage])
    assert report.results == [expected] * 2
