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
    done = function(buffer, work)
    return done if done is None else str(done), buffer  # what cannot travel is shown too


def _run(function: Callable, size: int) -> Report:
    """A run that is traced, so that who hangs is said to wait for whom."""
    return launch(working, 2, function, size, trace=True, device="cpu", timeout=2)


def meanwhile(function: Callable) -> None:
    """start the transfer, work once, on both ranks at the same time, and then wait for it"""
    events = _run(function, 1).events
    for rank, start in enumerate(("isend", "irecv")):
        calls = [e.note or e.op for e in events if e.rank == rank and e.op != "barrier"]
        seen = f"rank {rank} called {', then '.join(calls)}"
        assert calls == [start, "work", "wait"], f"{seen}: {_what_is_wrong(calls)}"


def _what_is_wrong(calls: list[str]) -> str:
    """What this order of calls means, without the order that is right."""
    if calls.count("work") != 1:
        return f"work must run once, and ran {calls.count('work')} times"
    before, after = calls[: calls.index("work")], calls[calls.index("work") + 1 :]
    if not before:
        return "it worked before its transfer had started"
    if {"send", "recv", "wait"} & set(before):
        return "it stood still before it worked"
    if not after:
        return "its transfer may not be over when it returns"
    return "this is not one transfer with the work in between"


def arrives(function: Callable) -> None:
    """bring a million numbers from rank 0 to rank 1, and return what work returned"""
    for rank, (done, buffer) in enumerate(_run(function, 1_000_000).results):
        expect(done, "done", f"on rank {rank} it returns")
        expect(buffer, torch.full((1_000_000,), 7.0), f"rank {rank}'s buffer")


build = Builder("nonblocking", {work_meanwhile: [meanwhile, arrives]})
