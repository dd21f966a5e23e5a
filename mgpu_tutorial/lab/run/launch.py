"""Start N real ranks from a notebook cell and bring back what they did."""

import os
import time
from collections.abc import Callable
from multiprocessing import current_process
from numbers import Real
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mgpu_tutorial.lab.record import trace
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.run import errors, transfer
from mgpu_tutorial.lab.run.engine import (
    LOOPBACK,
    START_LIMIT,
    Interrupts,
    Ranks,
    await_server,
    text_of,
    workspace,
)
from mgpu_tutorial.lab.run.rank import Job

MAX_RANKS = 64


def launch(
    worker: Callable,
    world_size: int,
    *args: Any,
    device: str = "auto",
    backend: str | None = None,
    timeout: float = 30.0,
    trace: bool = False,
    **kwargs: Any,
) -> Report:
    """Run `worker(rank, world_size, *args, **kwargs)` in `world_size` fresh processes.

    Each process is one rank of a new default process group. It has one intra-op
    thread, the seed 0, and RANK, LOCAL_RANK, WORLD_SIZE in its environment.

    device   "auto": one GPU a rank where there are enough, else the CPU; "cpu";
             "cuda": one GPU a rank; "cuda:0": all ranks share that GPU (with gloo).
             The environment variable MGPU_DEVICE=cpu overrides "auto".
    backend  None: nccl with a GPU for each rank, else gloo; "none": no process
             group, the worker makes its own.
    timeout  seconds from the moment at which all ranks have joined.
    trace    record the communication into `report.events`.

    Raises RankFailed where a rank raised, died or left early; RanksHung at the
    timeout; TypeError or ValueError for arguments that cannot work, and
    CannotTravel for a worker or an argument that cannot be sent to a process.
    """
    _check_arguments(worker, world_size, timeout)
    device = _choose_device(device, world_size)
    backend = backend or ("nccl" if device == "cuda" else "gloo")
    with Interrupts() as interrupts, workspace(world_size) as folder:
        name = getattr(worker, "__name__", "the worker")
        call = {f"the worker {name}": worker}
        call |= {f"argument {i} of {name}": value for i, value in enumerate(args)}
        call |= {f"argument {key} of {name}": value for key, value in kwargs.items()}
        with interrupts.allowed():
            _send(
                call, {"worker": worker, "args": args, "kwargs": kwargs}, folder / "payload"
            )
            await_server()
        jobs = [
            Job(str(folder), rank, world_size, backend, _device_of(rank, device), trace)
            for rank in range(world_size)
        ]
        return _run(jobs, timeout, interrupts)


def _run(jobs: list[Job], timeout: float, interrupts: Interrupts) -> Report:
    origin = time.monotonic()
    ranks = Ranks(jobs, [_environment(job) for job in jobs])
    try:
        with interrupts.allowed():
            end, began, ended = ranks.watch(timeout)
            fates = [] if end == "ended" else ranks.fates()
    finally:
        ranks.stop()
    with interrupts.allowed():
        report = _collect(jobs, origin, ended - began, with_results=end == "ended")
    if end == "failed":
        raise errors.failure(fates, report)
    if end == "hung":
        raise errors.hang(fates, timeout, report)
    if end == "late":
        raise errors.hang(fates, START_LIMIT, report)
    return report


def _collect(jobs: list[Job], origin: float, seconds: float, with_results: bool) -> Report:
    report = Report(world_size=len(jobs), seconds=seconds)
    for job in jobs:
        report.stdout.append(text_of(job.home / "stdout"))
        report.stderr.append(text_of(job.home / "stderr"))
        report.events += trace.read(job.home / "events", job.rank, origin)
        if with_results:
            result = job.home / "result"
            report.results.append(transfer.read(result) if result.exists() else None)
    return report


def _send(named: dict[str, Any], payload: dict, path: Path) -> None:
    try:
        transfer.write(payload, path, "")
    except transfer.CannotTravel:
        for name, value in named.items():  # find the one that cannot, and name it
            transfer.write(value, path, name)
        raise


def _environment(job: Job) -> dict[str, str]:
    """The kernel's environment of this moment and what torchrun would add to it."""
    return os.environ | {
        "RANK": str(job.rank),
        "LOCAL_RANK": str(job.rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        trace.FOLDER: str(job.home),
    }


def _check_arguments(worker: Any, world_size: Any, timeout: Any) -> None:
    if trace.FOLDER in os.environ:
        raise RuntimeError(
            f"launch() was called inside rank {os.environ.get('RANK')}: a rank cannot "
            "start ranks. Call launch from the notebook, torch.distributed from the worker."
        )
    if getattr(current_process(), "_inheriting", False):  # as multiprocessing itself asks
        raise RuntimeError(
            "launch() was called while a rank imports this program. Put the call under "
            'if __name__ == "__main__":'
        )
    main = getattr(__import__("__main__"), "__file__", None)
    if main == "<stdin>":
        raise RuntimeError(
            "launch() was called from a program read from standard input, which a new "
            "process cannot import again. Save it to a file, or use a notebook."
        )
    if not callable(worker):
        raise TypeError(
            "worker must be a function worker(rank, world_size, …), got "
            f"{type(worker).__name__}: {worker!r}. "
            "Write launch(worker, 2), not launch(worker(0, 2), 2)."
        )
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(
            "world_size must be a whole number of ranks, got "
            f"{type(world_size).__name__}: {world_size!r}."
        )
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(
            f"world_size must be from 1 to {MAX_RANKS}, got {world_size}: each rank is a "
            "process of its own on this machine. More ranks need more machines: see torchrun."
        )
    if (
        isinstance(timeout, bool)
        or not isinstance(timeout, Real)
        or not 0 < timeout < float("inf")
    ):
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}.")


def _choose_device(device: str, world_size: int) -> str:
    """Resolve "auto", and refuse what this machine does not have."""
    gpus = torch.cuda.device_count()
    if device == "auto":
        forced = os.environ.get("MGPU_DEVICE", "")
        if forced not in ("", "auto"):
            return _choose_device(forced, world_size)
        return "cuda" if dist.is_nccl_available() and gpus >= world_size else "cpu"
    if device == "cpu":
        return device
    if device == "cuda" and gpus < world_size:
        raise ValueError(
            f"device='cuda' gives each of {world_size} ranks a GPU of its own, and this "
            f"machine has {gpus}. Use device='auto' or 'cpu', or 'cuda:0' to share one GPU."
        )
    kind, _, number = device.partition(":")
    if kind != "cuda" or (number and not number.isdigit()):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'cuda:N', got {device!r}.")
    if number and int(number) >= gpus:
        raise ValueError(f"device={device!r} was given, and this machine has {gpus} GPUs.")
    return device


def _device_of(rank: int, device: str) -> str:
    return f"cuda:{rank}" if device == "cuda" else device
