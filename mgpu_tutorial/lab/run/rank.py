"""Inside one rank: from the fresh process to the worker, and out again."""

import ctypes
import faulthandler
import gc
import io
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import parent_process
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from mgpu_tutorial.lab import borrowed
from mgpu_tutorial.lab.record import source_lines, trace
from mgpu_tutorial.lab.record.report import returned
from mgpu_tutorial.lab.run import errors, files, transfer
from mgpu_tutorial.lab.run.files import Job

SEED = 0
LINGER = 0.5  # seconds that a rank which returned stays for its peers
GUARD = 0.05  # seconds between two looks of a rank's guard
NEVER = timedelta(days=1000)  # for a group: the launcher's own timeout comes first


def enter(job: Job, environment: dict[str, str]) -> None:
    """Run one rank from its first line to its last; the outcome is in its folder."""
    gc.freeze()  # no garbage is looked for in what the server has imported
    gc.enable()  # the last line of server.py disabled it
    _own_streams(job.home)
    _own_environment(environment)
    trail = _watch(job)
    outcome = _run(job, trail)
    files.write_whole(job.home / files.OUTCOME, json.dumps(outcome))
    if outcome["kind"] == "returned":
        # Whoever closes first must not cut a last message: stay for the others a moment.
        everybody = _wait_for_all(job, files.OUTCOME, LINGER)
        # NCCL warns of a group that was not destroyed, gloo does not.
        if everybody and job.backend != "gloo" and dist.is_initialized():
            dist.destroy_process_group()


def _run(job: Job, trail: int) -> dict[str, Any]:
    """Load the worker, join the group, call the worker; say how it ended."""
    try:
        if job.trace:
            trace.Recorder(job.home / files.EVENTS).install()
        worker, args, kwargs = transfer.read(job.folder / files.PAYLOAD)
        prepare(job.device)
        torch.set_num_threads(1)
        if job.backend != "none":
            store = dist.FileStore(str(job.folder / files.STORE), job.world_size)
            join(job.backend, job.rank, job.world_size, store=store, timeout=NEVER)
        else:
            borrowed.keep_stores_on_loopback()
        (job.home / files.READY).touch()
        _wait_for_all(job, files.READY)  # so that no worker outruns the others' joining
        _note_place(trail, source_lines.of_function(worker))
        began = time.monotonic()
        result = worker(job.rank, job.world_size, *args, **kwargs)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # an error of a kernel is the worker's
        if result is not None:
            transfer.write(result, job.home / files.RESULT, {"the result": result})
    except BaseException as error:  # SystemExit and KeyboardInterrupt end a worker too
        return errors.outcome_of(error)
    return {"kind": "returned", "began": began, "ended": time.monotonic()}


def prepare(device: str) -> None:
    """The same seed on every rank, and the rank's device as default."""
    # A rank is a fork of a server, and what it starts is a fork of the rank where forks are
    # safe. Python's own default there is a server too from 3.14 on: its processes would
    # import torch again, and could not load what a cell has made.
    multiprocessing.set_start_method("fork" if sys.platform == "linux" else None, force=True)
    random.seed(SEED)
    np.random.seed(SEED)
    if torch.accelerator.is_available():
        torch.manual_seed(SEED)
    else:  # the same, without looking for devices: some 3 ms of every rank
        torch.default_generator.manual_seed(SEED)
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device))
        torch.set_default_device(device)


def join(backend: str, rank: int, world_size: int, **options: Any) -> None:
    """Meet the other ranks and form the default process group."""
    dist.set_debug_level_from_env()  # the fork server read it long before it was set
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    options |= {"rank": rank, "world_size": world_size, "device_id": device}
    dist.init_process_group(backend, **options)


def under_torchrun(worker: Callable, kwargs: dict[str, Any]) -> NoReturn:
    """Run `worker` as the one rank that torchrun made of this process, then exit."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    # All ranks share one terminal: write whole lines, or they run into each other.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    enough = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = enough and os.environ.get("MGPU_DEVICE") != "cpu"
    prepare(f"cuda:{local_rank}" if gpus else "cpu")  # OMP_NUM_THREADS decides on threads
    join("nccl" if gpus else "gloo", rank, world_size)
    result = worker(rank, world_size, **kwargs)
    if result is not None:
        print(f"[rank {rank}]", "\n".join(returned(result)), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo's may outlive its group, and abort Python's own end


def _own_streams(home: Path) -> None:
    """Send file descriptors 1 and 2, so C++ messages too, to this rank's files."""
    for name, descriptor in ((files.STDOUT, 1), (files.STDERR, 2)):
        with open(home / name, "ab") as file:  # at its end, whoever else writes to it
            os.dup2(file.fileno(), descriptor)
        raw = io.FileIO(descriptor, "w", closefd=False)  # a rank that is killed keeps nothing
        style = {"errors": "backslashreplace", "write_through": True}
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", **style))


def _own_environment(environment: dict[str, str]) -> None:
    """The kernel's environment of this moment; signals as in a program of its own."""
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None  # the next question reads TMPDIR
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the fork server's clock
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _note_place(trail: int, place: source_lines.SourceLine | None) -> None:
    """Replace the line in the file `trail`, which outlives this rank, by an own line."""
    if place:
        os.pwrite(trail, json.dumps(place).encode().ljust(1024), 0)


def _watch(job: Job) -> int:
    """Leave a trail for the kernel, and die with it."""
    os.setsid()  # Ctrl-C belongs to the kernel; the launcher can stop our children
    stack = open(job.home / files.STACK, "a")  # noqa: SIM115  (as long as the process)
    faulthandler.enable(stack, all_threads=True)
    faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    (job.home / files.PID).write_text(str(os.getpid()))  # now the kernel may ask
    if sys.platform == "linux":  # the fork server's death is the kernel's death
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    trail = os.open(job.home / files.WHERE, os.O_CREAT | os.O_WRONLY, 0o600)
    threading.Thread(target=_guard, args=(trail,), name="guard", daemon=True).start()
    return trail


def _guard(trail: int) -> None:
    """Note where the worker is; end with the fork server, which ends with the kernel."""
    main, parent = threading.main_thread().ident, parent_process()
    while parent.is_alive():
        _note_place(trail, source_lines.of_frame(sys._current_frames().get(main)))
        parent.join(GUARD)
    os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_all(job: Job, name: str, limit: float = float("inf")) -> bool:
    """Wait until each rank has a file `name`; False where one has none in time."""
    missing = [files.home_of(job.folder, rank) / name for rank in range(job.world_size)]
    end, pause = time.monotonic() + limit, 0.001
    while missing := [path for path in missing if not path.exists()]:
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(1.05 * pause, 0.01)  # 64 ranks that ask all the time hinder the last one
    return True
