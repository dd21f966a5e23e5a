"""A film shows what the ranks noted, and from whom it came."""

import torch.distributed as dist

from mgpu_tutorial.lab import film, frame, launch


def swap(rank, world_size):
    words = ["zero", "one"]
    frame("Before.", {"mine": words[rank]}, step=0)
    dist.barrier()
    there = 1 - rank
    frame(
        "After.", {"other": (words[there], there)}, {"other": (there, "mine")}, step=rank + 1
    )


def test_a_brick_from_another_slot_and_steps_by_number():
    frames = film(launch(swap, 2, trace=True)).frames
    assert [drawing.text.splitlines()[1:] for drawing in frames] == [
        ["  rank 0: mine zero", "  rank 1: mine one"],
        ["  rank 0: other one", "  rank 1: mine one", "  mine into other: rank 1 → rank 0"],
        ["  rank 0: other one", "  rank 1: other zero", "  mine into other: rank 0 → rank 1"],
    ]
