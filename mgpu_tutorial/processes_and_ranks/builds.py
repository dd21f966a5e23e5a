"""What the reader's `hello` must do, tried with the four variables that torchrun would set."""

import os
import re
from collections.abc import Callable

import torch.distributed as dist

from mgpu_tutorial.lab import launch
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.teach.build import Builder, expect
from mgpu_tutorial.processes_and_ranks.hello import hello
from mgpu_tutorial.processes_and_ranks.meeting import free_port


def started(rank: int, world_size: int, port: int, script: Callable) -> bool:
    """One rank of a script; returns whether it is still in its group at the end."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    script()
    return dist.is_initialized()


def _run(script: Callable, world_size: int) -> Report:
    port = free_port()
    return launch(
        started, world_size, port, script, backend="none", device="cpu", timeout=10
    )


def _numbers(report: Report) -> list[list[int]]:
    """The numbers in what each rank printed, in their order."""
    return [[int(n) for n in re.findall(r"\d+", said)] for said in report.stdout]


def ends(function: Callable) -> None:
    """run to its end on 2 ranks"""
    _run(function, 2)


def says_who(function: Callable) -> None:
    """print on each of 3 ranks its own rank and the world size"""
    said = [numbers[:2] for numbers in _numbers(_run(function, 3))]
    expect(said, [[0, 3], [1, 3], [2, 3]], "the first two numbers of each rank")


def adds_up(function: Callable) -> None:
    """print the sum of all ranks, the same on each of them"""
    for world_size in (1, 2, 3):
        said = [numbers[-1:] for numbers in _numbers(_run(function, world_size))]
        total = sum(range(world_size))
        expect(said, [[total]] * world_size, f"on {world_size} ranks the last number")


def leaves(function: Callable) -> None:
    """leave the process group before it ends"""
    for rank, is_member in enumerate(_run(function, 2).results):
        assert not is_member, f"rank {rank} still is in the group when the script ends"


build = Builder("processes_and_ranks", {hello: [ends, says_who, adds_up, leaves]})
