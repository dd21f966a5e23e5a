"""What cannot be cut is refused in one sentence; what can is in exactly one part."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial import data_partitioning as dp

REFUSED = [
    ("[0.5, -0.1, 0.6]", dp.part_ends, 100, [0.5, -0.1, 0.6]),
    ("[0.5, 0.6]", dp.DataPartitioner, range(100), [0.5, 0.6]),
    ("parts [0, 1] of 10 samples", dp.DataPartitioner, range(10), [0.04, 0.01]),
    ("no rank 2 of 2", dp.share, 10, 2, 2),
    ("no rank -1 of 2", dp.cut_alone, -1, 2, 10, 1),
    ("no rank 5 of 2", dp.rank_indices, 5, 2, 10, 1, 0, False),
    ("no rank -1 of 2", dp.rank_indices, -1, 2, 10, 1, 0, True),
    ("no rank -1 of 2", dp.global_batches, -1, 2, 10, 4, 1, 0),
    ("no rank 2 of 2", dp.global_batches, 2, 2, 10, 4, 1, 0),
    ("3 samples", dp.new_loader, range(3), 0, 2, 4, 1),
    ("a batch of 5", dp.new_loader, range(8), 0, 2, 5, 1),
    ("no rank 7 of 2", dp.StreamShare, range(8), 7, 2, 4),
    ("a batch of 2", dp.StreamShare, range(8), 0, 3, 2),
    ("an iterator", dp.StreamShare, iter(range(8)), 0, 2, 4),
]


@pytest.mark.parametrize("names, function, args", [(n, f, a) for n, f, *a in REFUSED])
def test_what_cannot_be_cut_is_refused(names, function, args):
    with pytest.raises((ValueError, TypeError)) as refused:
        function(*args)
    said = str(refused.value)
    assert names in said and len(said) < 200 and "\n" not in said


@given(st.integers(1, 300), st.lists(st.integers(1, 99), min_size=1, max_size=30))
def test_each_sample_is_in_exactly_one_part_or_the_sizes_are_refused(samples, weights):
    sizes = [weight / sum(weights) for weight in weights]
    ends = [0, *dp.part_ends(samples, sizes)]
    try:
        partitioner = dp.DataPartitioner(range(samples), sizes)
    except ValueError:
        assert len(set(ends)) < len(ends)  # a part would be empty
    else:
        parts = [list(partitioner.use(i)) for i in range(len(sizes))]
        assert all(parts) and sorted(sum(parts, [])) == list(range(samples))


def test_sizes_below_one_leave_the_rest_out():
    parts = dp.DataPartitioner(range(10), [0.3, 0.3])
    assert [len(set(parts.use(i))) for i in (0, 1)] == [3, 3]
    assert not set(parts.use(0)) & set(parts.use(1))
