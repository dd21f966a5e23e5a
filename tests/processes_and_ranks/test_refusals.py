"""Shares that are empty, or of other numbers than whole ones, add up as in one process."""

import pytest

from mgpu_tutorial.processes_and_ranks import meeting


@pytest.mark.parametrize("numbers", [[0.5], [0.5, 1.5, 3], [], [3, 4, 5]])
def test_all_ranks_have_the_sum_also_where_a_share_is_empty(numbers, ranks, tmp_path):
    path = str(tmp_path / "meeting")
    how = {"backend": "none", "timeout": 10}
    report = ranks(2, meeting.main_worker, path, numbers, **how)
    assert report.results == [sum(numbers)] * 2
