"""What the reader's `work_meanwhile` must do, by the results and the record of a run."""

from collections.abc import Callable

import torch
import torch.distributed as dist

from mgpu_tutorial.lab import span
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.nonblocking.transfers import work_meanwhile


def working(rank: int, world_size: int, function: Callable, size: int) -> tuple:
    """Rank 0 sends 7s; work that needs both ranks; returns what there is afterwards."""
    apart = dist.new_group()  # a transfer that is given up holds back those of its group

    def work() -> str:
        with span("work"):
            dist.barrier(apart)  # passes only if both ranks work at the same time
        return "done"

    buffer = torch.full((size,), 7.0 if rank == 0 else 0.0)
    return function(buffer, work), buffer


def _run(function: Callable, size: int) -> Report:
    """A run that is traced, so that who hangs is said to wait for whom."""
    return launch(working, 2, function, size, trace=True, device="cpu", timeout=2)


def meanwhile(function: Callable) -> None:
    """start the transfer, work on both ranks at the same time, and then wait for it"""
    report = _run(function, 1)
    for rank in (0, 1):
        events = [event for event in report.events if event.rank == rank]
        done = [event.note or event.op for event in events]
        seen = f"rank {rank} called " + ", then ".join(e for e in done if e != "barrier")
        assert "work" in done, f"rank {rank} never called work"
        place = done.index("work")
        starts = {event.index for event in events[:place] if event.op in ("isend", "irecv")}
        waits = {event.of for event in events[place:] if event.op == "wait"}
        assert starts and starts <= waits, seen + ", and that is all" * (not waits)


def arrives(function: Callable) -> None:
    """bring rank 0's numbers to rank 1, one or a million, and return what work returned"""
    for size in (1, 1_000_000):
        for rank, (done, buffer) in enumerate(_run(function, size).results):
            expect(done, "done", f"rank {rank}")
            expect(buffer, torch.full((size,), 7.0), f"rank {rank}'s buffer")


build = Builder("nonblocking", {work_meanwhile: [meanwhile, arrives]})
