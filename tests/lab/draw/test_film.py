"""A film shows what the ranks noted, and from whom it came."""

import torch
import torch.distributed as dist

from mgpu_tutorial.lab import film, frame, launch
from mgpu_tutorial.lab.draw.drawing import animated


def pass_on(rank, world_size):
    frame("Each has its own.", {"a": [rank]}, nbytes=1)
    received = torch.zeros(1)
    work = dist.isend(torch.ones(1), (rank + 1) % world_size)
    dist.recv(received, (rank - 1) % world_size)
    work.wait()
    frame("Each has two.", {"a": {rank, (rank - 1) % world_size}}, nbytes=2)
    dist.all_reduce(received)
    frame("Each has all.", {"a": range(world_size)}, nbytes=3)
    frame("Nothing is sent.", {"a": range(world_size), "b": "new"}, nbytes=3)


def test_who_sent_what_is_new(ranks):
    texts = [drawing.text for drawing in film(ranks(3, pass_on, trace=True)).frames]
    assert texts[0].splitlines() == [
        "Each has its own.",
        *(f"  rank {rank}: a {{{rank}}}" for rank in range(3)),
    ]
    assert texts[1].splitlines()[4:] == [
        "  a: rank 2 → rank 0",
        "  a: rank 0 → rank 1",
        "  a: rank 1 → rank 2",
    ]
    assert texts[2].splitlines()[4:] == [
        "  a: ranks 1, 2 → rank 0",
        "  a: ranks 0, 2 → rank 1",
        "  a: ranks 0, 1 → rank 2",
    ]
    assert texts[3].splitlines()[1:] == [
        f"  rank {rank}: a {{0 1 2}}, b new" for rank in range(3)
    ]


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


def test_everywhere_the_same_frames(ranks):
    shown = film(ranks(3, pass_on, trace=True))
    assert len(shown.widget().children[1].children) == len(shown.frames) == 4
    assert shown.still().count("<figure") == 4
    moving = animated(shown.frames).svg()
    assert all(f"class='f{i}'" in moving for i in range(4))
    assert all(frame.alt in animated(shown.frames).alt for frame in shown.frames)
