"""Ranks run through all nodes, local ranks and GPUs begin anew on each."""

import re

import pytest

from mgpu_tutorial.lab import cluster_map


def test_ranks_run_through_all_nodes_and_gpus_begin_anew_on_each():
    drawing = cluster_map(2, 3)
    assert repr(drawing).split("\n") == [
        "2 nodes with 3 GPUs each: world size 6",
        "node 0: rank 0 on cuda:0, 1 on cuda:1, 2 on cuda:2",
        "node 1: rank 3 on cuda:0, 4 on cuda:1, 5 on cuda:2",
    ]
    words = re.findall(r"<text[^>]*>([^<]*)</text>", drawing.svg())
    drawn = [word for word in words if re.match("rank|local|cuda", word)]
    assert drawn == [
        text
        for rank in range(6)
        for text in (f"rank {rank}", f"local rank {rank % 3}", f"cuda:{rank % 3}")
    ]


@pytest.mark.parametrize("numbers", [(0, 4), (2, 0)])
def test_a_cluster_of_nothing_is_refused(numbers):
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        cluster_map(*numbers)
