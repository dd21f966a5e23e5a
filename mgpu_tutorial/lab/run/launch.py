"""Start N real ranks from a notebook cell and bring back what they did."""

import inspect
import os
import re
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mgpu_tutorial.lab import borrowed
from mgpu_tutorial.lab.record import trace as recorder
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.lab.run import errors, files, server, transfer
from mgpu_tutorial.lab.run.files import Job, text_of, workspace
from mgpu_tutorial.lab.run.interrupts import Interrupts
from mgpu_tutorial.lab.run.ranks import Ranks

MAX_RANKS = 64
LOOK = 0.05  # seconds between two looks at ranks that hang: who is only slow goes on


def launch(
    worker: Callable,
    world_size: int,
    *args: Any,
    device: str | torch.device = "auto",
    backend: str | None = None,
    timeout: float = 30.0,
    trace: bool = False,
    **kwargs: Any,
) -> Report:
    """Run `worker(rank, world_size, *args, **kwargs)` in `world_size` fresh processes.

    Each process is one rank of a new default process group. It has the seed 0, and
    RANK, LOCAL_RANK, WORLD_SIZE in its environment. Its TMPDIR belongs to the launch.

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
    try:
        _check(worker)
        given = {"device": device, "backend": backend, "timeout": timeout, "trace": trace}
        _check_names(worker, given)
        world_size = _whole_number(world_size)
        _check_timeout(timeout)
        device = _choose_device(device, world_size)
    except (TypeError, ValueError, RuntimeError) as refusal:
        raise errors.alone(refusal) from None
    backend = backend or ("nccl" if device == "cuda" else "gloo")
    with Interrupts() as interrupts, workspace(world_size) as folder:
        with interrupts.allowed():
            given = [*enumerate(args), *kwargs.items()]
            parts = {"the worker": worker} | {f"argument {key}": part for key, part in given}
            transfer.write((worker, args, kwargs), folder / files.PAYLOAD, parts)
            server.await_server()
        same = world_size, backend, trace
        jobs = [Job(folder, r, _device_of(r, device), *same) for r in range(world_size)]
        return _run(jobs, timeout, interrupts)


def _run(jobs: list[Job], timeout: float, interrupts: Interrupts) -> Report:
    origin = time.monotonic()
    ranks = Ranks(jobs)
    try:
        ranks.start([_environment(job) for job in jobs])
        with interrupts.allowed():
            end, seconds = ranks.watch(timeout)
            earlier = _events(jobs, origin) if end == "hung" else []
            time.sleep(LOOK if earlier else 0)
            outcomes = [] if end == "ended" else ranks.outcomes()
    except KeyboardInterrupt:
        lines = [outcome.line() for outcome in ranks.outcomes()]
        raise errors.Interrupted("\n".join(["the launch was interrupted", *lines])) from None
    finally:
        ranks.stop()
    with interrupts.allowed():  # to load a large result may take long
        report = _report(jobs, origin, seconds)
        if end == "failed":
            raise errors.failure(outcomes, report)
        if end == "hung":
            raise errors.hang(outcomes, timeout, report, earlier)
        report.results = _results(jobs, report)
    return report


def _report(jobs: list[Job], origin: float, seconds: float) -> Report:
    report = Report(world_size=len(jobs), seconds=seconds)
    for job in jobs:
        report.stdout.append(text_of(job.home / files.STDOUT))
        report.stderr.append(text_of(job.home / files.STDERR))
    report.events = _events(jobs, origin)
    return report


def _events(jobs: list[Job], origin: float) -> list[Event]:
    """What all ranks have recorded until now."""
    each = (recorder.read(job.home / files.EVENTS, job.rank, origin) for job in jobs)
    return [event for events in each for event in events]


def _results(jobs: list[Job], report: Report) -> list:
    results = []
    for job in jobs:
        path = job.home / files.RESULT
        try:
            results.append(transfer.read(path) if path.exists() else None)
        except Exception as error:
            raise errors.RankFailed(
                f"the result of rank {job.rank} was sent, and cannot be loaded here: "
                f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}. "
                "Return numbers, strings, tensors, or lists and dicts of them.",
                report,
            ) from None
    return results


def _environment(job: Job) -> dict[str, str]:
    """The kernel's environment of this moment and what torchrun would add to it."""
    unless_set = {
        "TORCHINDUCTOR_CACHE_DIR": str(server.kernel_folder() / "inductor"),
        "NCCL_SOCKET_IFNAME": files.LOOPBACK,
    }
    own = {
        "TMPDIR": str(job.folder / files.TEMPORARY),
        "RANK": str(job.rank),
        "LOCAL_RANK": str(job.rank),
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.world_size),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": files.LOOPBACK,
        files.FOLDER: str(job.home),
    }
    return unless_set | dict(os.environ) | own


def _check(worker: Any) -> None:
    """Refuse where no new process could be made from this one, and what is no worker."""
    if files.FOLDER in os.environ:
        raise RuntimeError(
            f"launch() was called inside rank {os.environ.get('RANK')}: a rank cannot "
            "start ranks. Call launch from the notebook, torch.distributed from the worker."
        )
    if borrowed.is_importing_main():  # as multiprocessing itself asks
        raise RuntimeError(
            "launch() was called while a rank imports this program. Put the call under "
            'if __name__ == "__main__":'
        )
    if not callable(worker):
        raise TypeError(
            "worker must be a function worker(rank, world_size, …), got "
            f"{type(worker).__name__}: {worker!r}. "
            "Write launch(worker, 2), not launch(worker(0, 2), 2)."
        )


def _check_names(worker: Callable, given: dict[str, Any]) -> None:
    """Refuse an option that the worker may have been meant to get: it never would."""
    try:
        theirs = inspect.signature(worker).parameters
    except (TypeError, ValueError):  # a builtin
        return
    usual = inspect.signature(launch).parameters
    for name, value in given.items():
        if name in theirs and value is not usual[name].default:
            raise ValueError(
                f"launch takes {name}={value!r} for itself, and the worker has a parameter "
                f"{name!r} too, which would not get it. Give the worker's another name."
            )


def _whole_number(world_size: Any) -> int:
    whole = hasattr(world_size, "__index__") and not isinstance(world_size, bool)
    if not whole or not 1 <= world_size <= MAX_RANKS:
        raise ValueError(
            f"world_size must be a whole number from 1 to {MAX_RANKS}, got {world_size!r}: "
            "each rank is a process on this machine. For more machines see torchrun."
        )
    return int(world_size)


def _check_timeout(timeout: Any) -> None:
    if isinstance(timeout, str | None) or not 0 < timeout < float("inf"):
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}.")


def _choose_device(device: Any, world_size: int) -> str:
    """Resolve "auto", and refuse what this machine does not have."""
    device, gpus = str(device), torch.cuda.device_count()
    if device == "auto":
        device = os.environ.get("MGPU_DEVICE") or "auto"
    if device == "auto":
        return "cuda" if dist.is_nccl_available() and gpus >= world_size else "cpu"
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        valid = "'auto', 'cpu', 'cuda' or 'cuda:N'"
        raise ValueError(f"device (or MGPU_DEVICE) must be {valid}, got {device!r}.")
    if device == "cuda" and gpus < world_size:
        raise ValueError(
            f"device='cuda' gives each of {world_size} ranks a GPU of its own, and "
            f"this machine has {gpus}. Use 'auto' or 'cpu', or 'cuda:0' to share one GPU."
        )
    if ":" in device and int(device.split(":")[1]) >= gpus:
        raise ValueError(f"device={device!r}, and this machine has {gpus} GPUs.")
    return device


def _device_of(rank: int, device: str) -> str:
    return f"cuda:{rank}" if device == "cuda" else device
