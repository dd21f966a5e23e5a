"""Workers that mark their work for the charts."""

from mgpu_tutorial.lab import span


def two_marked_steps(rank, world_size):
    with span("step"):
        for mark in ("F", "I", "W"):
            with span(f"{mark} {rank} 0"):
                pass
    with span("step"):
        for mark in ("F", "B"):
            with span(f"{mark} {rank} 1"):
                pass
