"""The fork server: a process that has imported torch once, and forks every rank.

Both sides are here: what the kernel calls, and `KernelWatch`, which the server begins when it
imports this module. Nothing here may import torch: the server begins while the kernel does.
"""

import atexit
import gc
import multiprocessing as mp
import os
import re
import signal
import sys
import threading
import time
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from mgpu_tutorial.lab import borrowed
from mgpu_tutorial.lab.run import files
from mgpu_tutorial.lab.run.files import kernel_folder

PRELOAD = [
    "mgpu_tutorial.lab.run.server",
    "torch",
    "torch.distributed",
    "torch.utils.serialization.config",  # torch.load imports it at its first call
    "mgpu_tutorial.lab.run.rank",
    f"{__name__.partition('.')[0]}.preload",  # what the ranks of a chapter need
]
KERNEL = "MGPU_KERNEL"  # in the server's environment: the kernel's process and folder
CELL = "MGPU_CELL"  # there too: the text of the cell that starts the server
# In the server's environment too: glibc asks for huge pages, so that a rank is forked sooner.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
STARTS = "the fork server imports PyTorch: some seconds, once in each notebook ({:.0f})"
LOOK = 0.5  # seconds between two looks of the server whether the kernel still lives
FORKS = mp.get_context("forkserver")
_warm: set[int | None] = set()  # servers that have done their imports and forked a process


def start() -> None:
    """Have the fork server begin its imports, unless it runs already; returns at once."""
    FORKS.set_forkserver_preload(PRELOAD)
    resource_tracker.ensure_running()  # now: its start lifts the mask that is set below
    (kernel_folder() / files.LOG).write_text("")
    given = {KERNEL: f"{os.getpid()}:{kernel_folder()}", CELL: running_cell(), **HUGE_PAGES}
    given = {name: text for name, text in given.items() if name not in os.environ}
    os.environ.update(given)
    # Ctrl-C is for the kernel; the server's first instructions would die of it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        for name in given:
            del os.environ[name]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def await_server() -> None:
    """Start the server and wait for its imports; Ctrl-C may reach this wait."""
    from mgpu_tutorial.lab.run.progress import Line  # which imports this module

    start()
    if borrowed.fork_server_pid() in _warm:
        return
    first = FORKS.Process(target=time.sleep, args=(0,), daemon=True, name="the fork server")
    failed: list[Exception] = []

    def ask() -> None:
        try:
            fork([first])
            first.join()
        except Exception as error:
            failed.append(error)

    asking = threading.Thread(
        target=ask, daemon=True
    )  # so that this one can say why it waits
    asking.start()
    begin = time.monotonic()
    with Line() as line:
        while asking.is_alive():
            line.draw(time.monotonic() - begin, STARTS.format)
            asking.join(LOOK / 10)
    if failed:
        raise failed[0]
    _warm.add(borrowed.fork_server_pid())


def fork(processes: list[mp.Process]) -> None:
    """Have the server fork these; RankFailed for one that it does not."""
    from mgpu_tutorial.lab.record.report import Report  # which import torch
    from mgpu_tutorial.lab.run.errors import RankFailed

    try:
        for process in processes:
            process.start()
    except (OSError, EOFError) as error:
        borrowed.stop_fork_server()  # a request that we could not finish ends it anyway
        reason = last_error() or f"{type(error).__name__}: {error}".rstrip(": ")
        said = f"{process.name} could not be started: {reason}"
        raise RankFailed(said, Report(world_size=0)) from None


def last_error() -> str:
    """The last error, with its place, of the server or a rank's first instructions."""
    text = files.text_of(kernel_folder() / files.LOG).strip()
    places = re.findall(r'File "(.*)", line (\d+)', text)
    place = f" ({places[-1][0]}, line {places[-1][1]})" if places else ""
    return text.splitlines()[-1] + place if text else ""


def notebook_kernel() -> Any:
    """The Jupyter kernel that this process is, or None."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None)


def running_cell() -> str:
    """How the cell begins that runs at this moment; "" outside of IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython and ipython.get_ipython()
    return (shell.user_ns.get("In") or [""])[-1][:9999] if shell else ""


def stay_on_this_machine() -> None:
    """Gloo and NCCL meet on the loopback interface, in whatever this process starts."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, files.LOOPBACK)


def end_with(kernel: Any) -> None:
    """Stop ranks, the server and the resource tracker when `kernel` is told to shut down.

    ipykernel's own signal is ignored by the tracker, and each restart would wait for seconds.
    """
    shut_down = kernel.do_shutdown

    def end_launches() -> None:  # of another thread, which then cleans up
        end = time.monotonic() + files.SWEEP_LIMIT
        while any(kernel_folder().glob(f"{files.LAUNCHES}*")) and time.monotonic() < end:
            kill_ranks(kernel_folder())
            time.sleep(0.02)

    def stop_first(restart: bool) -> Any:
        stops = [end_launches, borrowed.run_exit_handlers]  # each may look for the next
        for stop in [*stops, borrowed.stop_fork_server, borrowed.stop_resource_tracker]:
            with suppress(Exception):
                stop()
        return shut_down(restart)

    kernel.do_shutdown = stop_first


def kill_ranks(folder: Path) -> None:
    """Kill the process groups of all ranks that run below a kernel's folder."""
    for path in folder.glob(f"{files.LAUNCHES}*/rank*/{files.PID}"):
        with suppress(ValueError, OSError):
            os.killpg(int(path.read_text()), signal.SIGKILL)


class KernelWatch:
    """When the kernel is gone, kill its ranks, remove its folder, and end.

    A clock's signal looks for it: ranks may keep open what would tell of the kernel's end.
    """

    def __init__(self, kernel: int, folder: Path) -> None:
        self.kernel, self.folder, self.server = kernel, folder, os.getpid()

    def begin(self) -> None:
        """Outlive the kernel by a moment; keep what this process writes in its folder."""
        os.setsid()  # JupyterLab kills a kernel together with its process group
        with open(self.folder / files.LOG, "ab") as log_file:
            os.dup2(log_file.fileno(), 1)
            os.dup2(log_file.fileno(), 2)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(self.folder / "inductor"))
        atexit.register(self.at_exit)
        signal.signal(signal.SIGALRM, self.look)
        signal.siginterrupt(signal.SIGALRM, False)  # C code that reads need not know of it
        signal.setitimer(signal.ITIMER_REAL, LOOK, LOOK)

    def look(self, *_: object) -> None:
        """End if the kernel has ended; a fork of the server leaves that to the server."""
        if os.getpid() == self.server and os.getppid() != self.kernel:
            signal.setitimer(signal.ITIMER_REAL, 0)
            kill_ranks(self.folder)
            files.sweep(self.folder)
            os._exit(0)

    def at_exit(self) -> None:
        """A kernel that ends closes its files before it is gone: look for a second."""
        end = time.monotonic() + 1
        while self.folder.exists() and time.monotonic() < end:
            self.look()
            time.sleep(0.01)


# Only the server itself, not whatever else has inherited the variable. From Python 3.14 on
# the program's own arguments come after the server's.
if KERNEL in os.environ and "multiprocessing.forkserver" in " ".join(sys.orig_argv):
    _kernel, _folder = os.environ.pop(KERNEL).split(":", 1)  # no rank inherits it
    KernelWatch(int(_kernel), Path(_folder)).begin()
    gc.disable()  # a fifth sooner; a rank then freezes all that was imported
