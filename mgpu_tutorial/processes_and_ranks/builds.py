"""What the reader's `hello` must do, tried with the variables that torchrun would set."""

import os
import re
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.teach.build import Builder, cut, launch
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


def _run(script: Callable, ranks: int) -> Report:
    return launch(
        started, ranks, free_port(), script, backend="none", device="cpu", trace=True
    )


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"\d+(?:\.\d+)?", text)]


def says_who(function: Callable) -> None:
    """print its rank, the world size, and last the sum of all ranks, on 1, 2 and 3 ranks"""
    for ranks in (1, 2, 3):
        report = _run(function, ranks)
        for rank, said in enumerate(report.stdout):
            wanted = [rank, ranks, sum(range(ranks))]
            found = map(_numbers, [said, *said.splitlines()])  # in one line, or over several
            seen = f"rank {rank} of {ranks} printed {cut(repr(said.strip()), 300)}"
            in_it = f"{rank}, {ranks} and last {wanted[-1]} in a line"
            assert any(n[:2] + n[-1:] == wanted for n in found), f"{seen}, expected {in_it}"
            talks = any(e.rank == rank and e.op != "barrier" for e in report.events)
            assert talks or ranks == 1, f"{seen}, but has heard no number of another rank"


def leaves(function: Callable) -> None:
    """leave the process group before it ends"""
    for rank, is_member in enumerate(_run(function, 3).results):
        assert not is_member, f"rank {rank} is still in the group when the script ends"


build = Builder("processes_and_ranks", {hello: [says_who, leaves]})
