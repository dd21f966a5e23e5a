"""Inside one rank: from the fresh process to the worker, and out again.

Everything that a rank tells the kernel goes through files in its own folder, so
that the news of a rank that is killed is not lost with it:

    stdout stderr   what it printed          outcome   how the worker ended
    stack           faulthandler's dumps     result    what it returned
    where           its last own line        events    the trace
    ready           it has joined the group  progress  how far it is, and its `status`
    pid             its process and group    lasting   what keeps it from ending
"""

import contextlib
import ctypes
import dis
import faulthandler
import gc
import inspect
import io
import json
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import active_children, parent_process
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from mgpu_tutorial.lab import borrowed
from mgpu_tutorial.lab.record import source_lines, trace
from mgpu_tutorial.lab.record.report import returned
from mgpu_tutorial.lab.run import transfer

LINGER = 0.5  # seconds that a rank which returned stays for its peers
GROUP_TIMEOUT = 3600.0  # seconds at least: the launcher's own timeout comes first
LONGEST_TIMEOUT = 1e9  # seconds: more than this overflows in C++
LOST_PEER = re.compile(
    r"gloo.*(closed by peer|reset by peer|Broken pipe|Socket (closed|Timeout)"
    r"|pair closure|Connection refused)"
    r"|remote process exited|ncclRemoteError|Connection was likely closed",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True)
class Job:
    """What a rank must know before it can load its worker."""

    folder: str
    rank: int
    world_size: int
    backend: str
    device: str
    trace: bool
    threads: int = 1
    seed: int = 0
    timeout: float = 30.0

    @property
    def home(self) -> Path:
        return Path(self.folder, f"rank{self.rank}")


def enter(job: Job, environment: dict[str, str]) -> None:
    """Run one rank from its first line to its last; the outcome is in its folder."""
    home = job.home
    _own_streams(home)
    _own_environment(environment)
    _watch(job)
    process = os.getpid()
    outcome = _run(job)
    if os.getpid() != process:  # the worker had forked: this is not the rank
        sys.stderr.write(outcome.get("traceback", ""))
        os._exit(0)
    _say(home, outcome)
    _flush()
    if outcome["kind"] == "returned":
        # Whoever closes first must not cut a last message: stay for the others a moment.
        everybody = _wait_for_all(job, "outcome")
        names = _tell_what_lasts(home)
        if dist.is_initialized() and (job.backend != "gloo" if everybody else names):
            _leave_the_group()
        if everybody or names:  # threads and children may go on as after any program
            return
    borrowed.run_exit_handlers()  # stops a DataLoader's workers, as a normal exit does
    os._exit(0)  # closes the sockets at once: a peer that still waits learns it now


def _run(job: Job) -> dict[str, Any]:
    """Load the worker, join the group, call the worker; say how it ended."""
    began, process = None, os.getpid()
    try:
        if job.trace:
            trace.start(job.home / "events")
        call = transfer.read(Path(job.folder, "payload"))
        _check_signature(call["worker"], job, call["args"], call["kwargs"])
        prepare(job.rank, job.device, job.seed, job.threads)
        if job.backend != "none":
            store = dist.FileStore(str(Path(job.folder, "store")), job.world_size)
            join(job.backend, job.rank, job.world_size, limit=2 * job.timeout, store=store)
        (job.home / "ready").touch()
        _wait_for_all(
            job, "ready", forever=True
        )  # so that no worker outruns the others' joining
        began = time.monotonic()
        result = call["worker"](job.rank, job.world_size, *call["args"], **call["kwargs"])
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # an error of a kernel is the worker's
        if result is not None and os.getpid() == process:
            transfer.write(result, job.home / "result", f"the result of rank {job.rank}")
    except BaseException as error:  # SystemExit and KeyboardInterrupt end a worker too
        return _raised(error)
    return {"kind": "returned", "began": began, "ended": time.monotonic()}


def _tell_what_lasts(home: Path) -> list[str]:
    """Name what may keep this process alive, for the kernel that cannot wait for ever."""
    threads = [
        thread.name
        for thread in threading.enumerate()
        if (not thread.daemon or thread.name == "QueueFeederThread")  # joined by its queue
        and thread is not threading.main_thread()
    ]
    names = threads + [child.name for child in active_children()]
    if names:
        (home / "lasting").write_text(", ".join(names), encoding="utf-8")
    return names


def _leave_the_group() -> None:
    """Close this rank's connections, so that a peer which still waits learns it now."""
    dist.destroy_process_group()
    gc.collect()  # a model in a cycle may hold the group


def prepare(rank: int, device: str, seed: int = 0, threads: int | None = 1) -> None:
    """The same seed on every rank, the rank's device as default, so many intra-op threads.

    With `threads=None` the environment decides (OMP_NUM_THREADS), as it does in a program
    that torchrun starts.
    """
    # Processes of its own start as the platform starts them, not by another fork server.
    multiprocessing.set_start_method(None, force=True)
    if threads is not None:
        torch.set_num_threads(threads)
    random.seed(seed)
    np.random.seed(seed)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # the same, without looking for devices: some 3 ms of every rank
        torch.default_generator.manual_seed(seed)
    if device.startswith("cuda"):
        torch.cuda.set_device(torch.device(device))
        torch.set_default_device(device)


def join(
    backend: str, rank: int, world_size: int, limit: float = 0.0, **rendezvous: Any
) -> None:
    """Meet the other ranks and form the default process group.

    Its operations may wait for `limit` seconds, and for GROUP_TIMEOUT at least.
    """
    seconds = min(max(GROUP_TIMEOUT, limit), LONGEST_TIMEOUT)
    dist.set_debug_level_from_env()  # the fork server read it long before it was set
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
        device_id=device,
        **rendezvous,
    )


class WrongSignature(TypeError):
    """The worker does not take the arguments that launch was given."""


def _check_signature(worker: Callable, job: Job, args: tuple, kwargs: dict) -> None:
    try:
        signature = inspect.signature(worker)
    except ValueError:  # some built-in functions do not tell theirs
        return
    try:
        signature.bind(job.rank, job.world_size, *args, **kwargs)
    except TypeError as error:
        raise WrongSignature(
            f"{name_of(worker)}{signature} cannot be called as "
            f"worker(rank, world_size{_listed(args, kwargs)}): {error}"
        ) from None


def name_of(worker: Callable) -> str:
    """The name of a function, also inside a partial; of an object that of its class."""
    worker = getattr(worker, "func", worker)
    return getattr(worker, "__name__", type(worker).__name__)


def _listed(args: tuple, kwargs: dict) -> str:
    names = [f"<{type(value).__name__}>" for value in args]
    return "".join(f", {name}" for name in [*names, *(f"{k}=…" for k in kwargs)])


def _raised(error: BaseException) -> dict[str, Any]:
    stack = traceback.extract_tb(error.__traceback__)
    frames = [source_lines.SourceLine(f.filename, f.lineno or 0, f.name) for f in stack]
    setup = isinstance(error, WrongSignature | transfer.CannotTravel)
    where = None if setup else source_lines.innermost(frames)
    text = _message(error)
    lost_peer = isinstance(error, RuntimeError) and bool(LOST_PEER.search(text))
    return {
        "kind": "refused" if setup else "raised",
        "type": type(error).__name__,
        "message": text,
        "where": where,
        "lost_peer": lost_peer and not _raised_by_own_line(error),
        "traceback": _whole_traceback(error, text),
    }


def _message(error: BaseException, seen: frozenset[int] = frozenset()) -> str:
    """What an exception says, with the members of a group and the cause that it names."""
    seen |= {id(error)}
    try:
        text = str(error)
    except Exception as failure:
        text = f"(its message cannot be shown: {type(failure).__name__})"
    if isinstance(error, BaseExceptionGroup):
        members = [f"{type(e).__name__}: {_message(e, seen)}" for e in error.exceptions]
        text = "\n".join([text, *members])
    cause = error.__cause__
    if cause is not None and id(cause) not in seen:  # `raise e from e` is its own cause
        text += f"\nbecause of {type(cause).__name__}: {_message(cause, seen)}"
    return text


def _raised_by_own_line(error: BaseException) -> bool:
    """Whether a `raise` of the learner's made the error, and not a call that failed."""
    step = error.__traceback__
    while step is not None and step.tb_next is not None:
        step = step.tb_next
    if step is None:
        return False
    code = step.tb_frame.f_code
    is_raise = code.co_code[step.tb_lasti] == dis.opmap["RAISE_VARARGS"]
    return is_raise and source_lines.is_own(code.co_filename)


def _whole_traceback(error: BaseException, text: str) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:
        return "".join(traceback.format_tb(error.__traceback__)) + text


def _say(home: Path, outcome: dict[str, Any]) -> None:
    draft = home / "outcome.draft"
    draft.write_text(json.dumps(outcome), encoding="utf-8")
    os.replace(draft, home / "outcome")  # whole or not at all


def _wait_for_all(job: Job, name: str, forever: bool = False) -> bool:
    """Wait until each rank has a file `name`; False where one has none after LINGER."""
    missing = [Path(job.folder, f"rank{rank}", name) for rank in range(job.world_size)]
    end = time.monotonic() + LINGER
    pause = 0.001
    while missing := [path for path in missing if not path.exists()]:
        if not forever and time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(1.05 * pause, 0.01)  # 64 ranks that ask all the time hinder the last one
    return True


def _own_streams(home: Path) -> None:
    """Send file descriptors 1 and 2, so C++ messages too, to this rank's files."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        with open(home / name, "ab") as file:  # at its end, whoever else writes to it
            os.dup2(file.fileno(), descriptor)
        stream = io.TextIOWrapper(
            open(descriptor, "wb", buffering=0, closefd=False),  # noqa: SIM115
            encoding="utf-8",
            errors="backslashreplace",
            write_through=True,  # a rank that is killed keeps nothing back
        )
        setattr(sys, name, stream)


def _own_environment(environment: dict[str, str]) -> None:
    """The kernel's environment of this moment; signals as in a program of its own."""
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    tempfile.tempdir = None  # the next question reads TMPDIR
    if hasattr(signal, "pthread_sigmask"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the fork server's clock
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _watch(job: Job) -> None:
    """Leave a trail for the kernel, and die with it."""
    home = job.home
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C belongs to the kernel; the launcher can stop our children
    stack = open(home / "stack", "a")  # noqa: SIM115  (open as long as the process)
    faulthandler.enable(stack, all_threads=True)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, stack, all_threads=True)
    (home / "pid").write_text(str(os.getpid()))  # now the kernel may ask
    if sys.platform == "linux":  # the fork server's death is the kernel's death
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    where = os.open(home / "where", os.O_CREAT | os.O_WRONLY, 0o600)
    main = threading.main_thread().ident

    def mark(frame: Any) -> None:
        place = source_lines.of_frame(frame)
        if place:
            with contextlib.suppress(OSError):  # a full disk
                os.pwrite(where, json.dumps(place).encode().ljust(1024), 0)

    def guard() -> None:
        parent = parent_process()
        while True:
            if parent is not None:
                parent.join(0.05)
            if (parent is not None and not parent.is_alive()) or not home.exists():
                os.kill(os.getpid(), signal.SIGKILL)
            mark(sys._current_frames().get(main))

    for name in ("_exit", "kill", "abort"):  # a rank that ends itself says where
        setattr(os, name, _marking(getattr(os, name), mark))
    threading.Thread(target=guard, name="guard", daemon=True).start()


def _marking(function: Callable, mark: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is threading.main_thread():
            mark(sys._getframe(1))
        return function(*args, **kwargs)

    return call


def progress(items: Any, total: int | None = None) -> Iterator:
    """Iterate over `items` and tell the kernel how far this rank is.

    `total` is needed where `items` has no length. Outside `launch` it only iterates.
    """
    total = total if total is not None else len(items)
    folder = os.environ.get(trace.FOLDER)
    if folder is None:
        yield from items
        return
    file = os.open(Path(folder, "progress"), os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        for done, item in enumerate(items):
            os.pwrite(file, f"{done} {total}\n".encode().ljust(40), 0)
            yield item
        os.pwrite(file, f"{total} {total}\n".encode().ljust(40), 0)
    finally:  # also where the loop is left early
        os.close(file)


def status(text: str) -> None:
    """Show one line of this rank under the progress bar, until its next line."""
    folder = os.environ.get(trace.FOLDER)
    if folder is not None:
        draft = Path(folder, "status.draft")
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, Path(folder, "status"))


def under_torchrun(worker: Callable, kwargs: dict[str, Any]) -> NoReturn:
    """Run `worker` as the one rank that torchrun made of this process, then exit."""
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local_rank = int(os.environ["LOCAL_RANK"])
    # All ranks share one terminal: write whole lines, or they run into each other.
    sys.stdout.reconfigure(line_buffering=True, write_through=False)
    enough = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    gpus = enough and os.environ.get("MGPU_DEVICE") != "cpu"
    device = f"cuda:{local_rank}" if gpus else "cpu"
    prepare(rank, device, threads=None)
    join("nccl" if gpus else "gloo", rank, world_size)
    result = worker(rank, world_size, **kwargs)
    if result is not None:
        print(f"[rank {rank}]", "\n".join(returned(result)), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    _flush()
    os._exit(0)  # a thread of gloo's may outlive its group, and abort Python's own end
