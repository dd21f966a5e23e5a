"""Ranks run through all nodes, local ranks and GPUs begin anew on each."""

import re

import pytest

from mgpu_tutorial.lab import cluster_map
from mgpu_tutorial.lab.colours import colour


def labels(drawing):
    return re.findall(r"<text[^>]*>([^<]*)</text>", drawing.svg())


def test_two_nodes_with_four_gpus_as_text():
    assert repr(cluster_map(2, 4)).split("\n") == [
        "2 nodes with 4 GPUs each: world size 8",
        "node 0: rank 0 on cuda:0, 1 on cuda:1, 2 on cuda:2, 3 on cuda:3",
        "node 1: rank 4 on cuda:0, 5 on cuda:1, 6 on cuda:2, 7 on cuda:3",
    ]


def test_the_picture_says_what_the_text_says():
    process, gpu = "process", ["cuda:0", "cuda:1"]
    assert labels(cluster_map(2, 2)) == [
        "2 nodes with 2 GPUs each: world size 4",
        "node 0",
        *(process, "rank 0", "local rank 0", gpu[0]),
        *(process, "rank 1", "local rank 1", gpu[1]),
        "node 1",
        *(process, "rank 2", "local rank 0", gpu[0]),
        *(process, "rank 3", "local rank 1", gpu[1]),
    ]


def test_each_rank_has_its_colour_and_the_picture_describes_itself():
    svg = cluster_map(2, 4).svg()
    assert all(f"stroke='{colour(rank)}' stroke-width='4'" in svg for rank in range(8))
    assert "<title>2 nodes with 4 GPUs each: world size 8, one rank per GPU</title>" in svg


def test_everything_lies_inside_the_picture():
    drawing = cluster_map(3, 2)
    boxes = re.findall(
        r"<rect x='([\d.]+)' y='([\d.]+)' width='([\d.]+)' height='([\d.]+)'", drawing.svg()
    )
    assert len(boxes) == 3 * (1 + 2 * 2)
    for x, y, width, height in (map(float, box) for box in boxes):
        assert x + width <= drawing.width and y + height <= drawing.height


def test_one_node_with_one_gpu_is_said_in_the_singular():
    assert repr(cluster_map(1, 1)).startswith("1 node with 1 GPU each: world size 1\n")


@pytest.mark.parametrize("numbers", [(0, 4), (2, 0)])
def test_a_cluster_of_nothing_is_refused(numbers):
    with pytest.raises(ValueError, match="must be at least 1, not 0"):
        cluster_map(*numbers)
