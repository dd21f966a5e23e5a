"""What the reader's `hello` must do, tried with the variables that torchrun would set."""

import functools
import os
import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.processes_and_ranks.meeting import free_port, hello


def started(rank: int, world_size: int, port: int, script: Callable) -> bool:
    """One rank of a script; returns whether it is still in its group at the end.

    All join before one goes on, or a rank with nothing to say leaves while others connect.
    """
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    init = dist.init_process_group

    def join(*given: Any, **more: Any) -> None:
        init(*given, **more)
        dist.barrier()

    dist.init_process_group = join
    script()
    return dist.is_initialized()


@functools.cache
def _run(script: Callable, world_size: int) -> Report:
    port = free_port()
    return launch(started, world_size, port, script, backend="none", device="cpu")


def _numbers(said: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", said)]


def says_who(function: Callable) -> None:
    """print its own rank and the world size first, on each of 3 ranks"""
    for rank, said in enumerate(_run(function, 3).stdout):
        seen = f"rank {rank} of 3 printed {said.strip()!r}"
        assert _numbers(said)[:2] == [rank, 3], seen


def adds_up(function: Callable) -> None:
    """print the sum of all ranks last, the same on each of 1, 2 and 3 ranks"""
    for world_size in (1, 2, 3):
        for rank, said in enumerate(_run(function, world_size).stdout):
            who, numbers = f"rank {rank} of {world_size}", _numbers(said)
            assert numbers, f"{who} printed no number"
            expect(numbers[-1], sum(range(world_size)), f"the last number that {who} printed")


def leaves(function: Callable) -> None:
    """leave the process group before it ends"""
    for rank, is_member in enumerate(_run(function, 3).results):
        assert not is_member, f"rank {rank} is still in the group when the script ends"


build = Builder("processes_and_ranks", {hello: [says_who, adds_up, leaves]})
