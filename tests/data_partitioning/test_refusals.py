"""What cannot be cut is refused in one sentence; what can is in exactly one part."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial import data_partitioning as dp

REFUSED = [
    ("positive fractions that add up to at most 1", dp.part_ends, 100, [0.5, -0.1, 0.6]),
    ("at most 1, got []", dp.part_ends, 100, []),
    ("at most 1, got [nan]", dp.part_ends, 100, [float("nan")]),
    ("at most 1, got [0.5, 0.6]", dp.DataPartitioner, range(100), [0.5, 0.6]),
    ("at most 1, got [2, 3]", dp.DataPartitioner, range(5), [2, 3]),
    ("parts [0, 1] of 10 samples", dp.DataPartitioner, range(10), [0.04, 0.01]),
    ("would be empty", dp.DataPartitioner, range(100), [0.001] * 10),
    ("would be empty", dp.DataPartitioner, range(0), [1.0]),
    ("no part -1 of 1", dp.DataPartitioner(range(9), [1.0]).use, -1),
    ("no part 1 of 1", dp.DataPartitioner(range(9), [1.0]).use, 1),
    ("no rank 2 of 2", dp.share, 10, 2, 2),
    ("no rank 0.5 of 2", dp.share, 10, 0.5, 2),
    ("no rank 0 of 2.5", dp.share, 10, 0, 2.5),
    ("0 or more, can be shared: got -3", dp.share, -3, 1, 2),
    ("can be shared: got 7.5", dp.share, 7.5, 0, 2),
    ("can be shared: got -3", dp.cut_alone, 0, 2, -3, 1),
    ("no rank 0.5 of 2", dp.global_batches, 0.5, 2, 10, 4, 1, 0),
    ("no rank -1 of 2", dp.cut_alone, -1, 2, 10, 1),
    ("no rank 5 of 2", dp.rank_indices, 5, 2, 10, 1, 0, False),
    ("no rank -1 of 2", dp.rank_indices, -1, 2, 10, 1, 0, True),
    ("no rank 0.5 of 2", dp.rank_indices, 0.5, 2, 10, 1, 0, False),
    ("no rank 0 of 0", dp.rank_indices, 0, 0, 4, 1, 0, False),
    ("no rank -1 of 2", dp.global_batches, -1, 2, 10, 4, 1, 0),
    ("a whole number, got 2.5", dp.global_batches, 0, 2, 10, 2.5, 1, 0),
    ("a whole number, got 0", dp.global_batches, 0, 2, 10, 0, 1, 0),
    ("a whole number, got -3", dp.global_batches, 0, 2, 10, -3, 1, 0),
    ("3 samples do not fill one batch of 4", dp.new_loader, range(3), 0, 2, 4, 1),
    ("a batch of 0", dp.new_loader, range(3), 0, 2, 0, 1),
    ("no rank 7 of 2", dp.StreamShare, range(8), 7, 2, 4),
    ("leaves some of 3 ranks", dp.StreamShare, range(8), 0, 3, 2),
    ("leaves some of 1 ranks", dp.StreamShare, range(8), 0, 1, 0),
    ("are counted", dp.StreamShare, range(8), 0, 2, 2.5),
    ("are counted", dp.StreamShare, range(8), 0, 2, 4, 1.5),
    ("done=-1", dp.StreamShare, range(8), 0, 2, 4, -1),
    ("at most 1, got ['0.5', '0.5']", dp.DataPartitioner, range(10), ["0.5", "0.5"]),
    ("at most 1, got 0.5", dp.DataPartitioner, range(10), 0.5),
    (
        "got tensor([0.5000, 0.5000]): give its .tolist()",
        dp.part_ends,
        10,
        torch.tensor([0.5, 0.5]),
    ),
    ("got [0.5 0.5]: give its .tolist()", dp.DataPartitioner, range(10), np.full(2, 0.5)),
    ("no part 0.5 of 1", dp.DataPartitioner(range(9), [1.0]).use, 0.5),
    ("no rank 1.0 of 2", dp.rank_indices, 1.0, 2, 10, 1, 0, False),
    ("samples=-3, seed=1 and epoch=0", dp.rank_indices, 0, 2, -3, 1, 0, False),
    ("epoch=1.5: give whole numbers", dp.rank_indices, 0, 2, 10, 1, 1.5, False),
    ("epoch=1.5: give whole numbers", dp.global_batches, 0, 2, 10, 4, 1, 1.5),
    ("a whole number, got True", dp.global_batches, 0, 2, 10, True, 1, 0),
    ("a batch of 4.0", dp.new_loader, range(8), 0, 2, 4.0, 1),
    ("drop_last must be True or False, got 'no'", dp.rank_indices, 0, 2, 10, 1, 0, "no"),
    ("drop_last must be True or False, got None", dp.rank_indices, 0, 2, 10, 1, 0, None),
    ("samples=True, seed=1", dp.rank_indices, 0, 2, True, 1, 0, False),
    ("only whole samples, 0 or more, can be cut: got -10", dp.part_ends, -10, [0.5]),
    ("only whole samples, 0 or more, can be cut: got 10.5", dp.part_ends, 10.5, [0.5]),
    ("no rank 2 of 2", dp.new_loader, range(8), 2, 2, 4, 1),
    ("no rank 0 of 0", dp.new_loader, range(8), 0, 0, 4, 1),
    ("used up after one pass", dp.StreamShare, iter(range(8)), 0, 2, 4),
]


@pytest.mark.parametrize("words, function, args", [(w, f, a) for w, f, *a in REFUSED])
def test_what_cannot_be_cut_is_refused(words, function, args):
    with pytest.raises((ValueError, TypeError)) as refused:
        function(*args)
    said = str(refused.value)
    assert words in said and len(said) < 200 and "\n" not in said


@pytest.mark.parametrize("rank", [0, 1])
def test_no_samples_make_no_batch(rank):
    assert dp.global_batches(rank, 2, 0, 4, 1, 0) == []


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
