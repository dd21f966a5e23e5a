"""What a rank holds, by formula; the chapter counts it after a real step."""

from hypothesis import given
from hypothesis import strategies as some

from mgpu_tutorial.sharding import arithmetic

FIRST_SHARDED = {"parameters": 3, "gradients": 2, "optimizer": 1}  # the stage


@given(some.integers(0, 3), some.integers(1, 64), some.integers(1, 10**6))
def test_a_stage_divides_what_it_shards_by_the_ranks(stage, ranks, parameters):
    # bfloat16 twice; master weights and two moments in float32
    assert arithmetic.MIXED == (2, 2, 12) and arithmetic.FLOAT32 == (4, 4, 8)
    found = arithmetic.held(parameters, ranks, stage)
    for (name, first), nbytes in zip(FIRST_SHARDED.items(), found, strict=True):
        whole = parameters * getattr(arithmetic.MIXED, name)
        assert nbytes == (whole / ranks if stage >= first else whole)
