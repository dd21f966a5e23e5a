"""The fork server: a process that has imported torch once, and forks every rank.

Both sides are here: `start`, which the kernel calls, and what the server itself does
when it imports this module. Nothing here may import torch, so that the server can begin
while the kernel is still importing it. The server outlives a kernel that is killed by just
long enough to end its ranks and to remove the kernel's temporary folder.
"""

import atexit
import gc
import importlib
import multiprocessing as mp
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from mgpu_tutorial.lab import borrowed
from mgpu_tutorial.lab.run import files
from mgpu_tutorial.lab.run.files import kernel_folder

PRELOAD = [  # and what `preload` adds
    "mgpu_tutorial.lab.run.server",
    "torch",
    "torch.distributed",
    "torch._dynamo",  # with the next one: two seconds less for a rank's first DDP
    "torch.nn.parallel.distributed",
    "torch.distributed.pipelining",
    "torch.utils.serialization.config",  # torch.load imports it at its first call
    "mgpu_tutorial.lab.run.rank",
]
KERNEL = "MGPU_KERNEL"  # in the server's environment: the kernel's process and folder
# In the server's environment too: glibc asks for huge pages, so that a rank is forked sooner.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
SERVER_LIMIT = 120.0  # seconds for the server's imports, on a busy machine
LAST_WORDS = 2.0  # seconds that a server which has hung up gets to say why
LOOK = 0.5  # seconds between two looks of the server whether the kernel still lives
FORKS = mp.get_context("forkserver")
_launching: set[int] = set()  # this process, once it has started a server
_warm: set[int | None] = set()  # servers that have done their imports and forked a process


# In the kernel


def start() -> None:
    """Have the fork server begin its imports, unless it runs already; returns at once."""
    if _launching - {os.getpid()}:
        raise RuntimeError(
            "launch() was called in a process forked from one that had launched ranks. "
            "Launch from the first one, or from a program of its own."
        )
    _launching.add(os.getpid())
    address = borrowed.fork_server_address()
    if address and not (is_alive() and Path(address).exists()):
        replace()
    FORKS.set_forkserver_preload(PRELOAD)
    resource_tracker.ensure_running()  # its start would undo the mask
    given = {KERNEL: f"{os.getpid()}:{kernel_folder()}", **HUGE_PAGES}
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
    start()
    if borrowed.fork_server_pid() in _warm:
        return
    written = len(log())
    if notebook_kernel():  # meanwhile, what the next cells need and what takes long
        import matplotlib.figure  # noqa: F401
        import sympy  # noqa: F401  torch.testing.assert_close needs it
    first = FORKS.Process(target=time.sleep, args=(0,), daemon=True)
    try:
        fork({"the fork server": first}, SERVER_LIMIT, written)
        first.join(SERVER_LIMIT)
        _warm.add(borrowed.fork_server_pid())
    finally:
        if first.is_alive():
            first.kill()


def fork(processes: dict[str, mp.Process], seconds: float, written: int) -> None:
    """Have the server fork these; RankFailed for one that it does not in so many seconds.

    What it said stands in the log behind the first `written` characters.
    """
    from mgpu_tutorial.lab.record.report import Report  # which import torch
    from mgpu_tutorial.lab.run.errors import RankFailed

    timer = threading.Timer(seconds, end_now)  # whoever waits for it then gets an EOFError
    timer.daemon = True
    timer.start()
    try:
        for who in processes:
            if not is_alive():  # multiprocessing would start one of its own
                raise EOFError
            processes[who].start()
    except (OSError, EOFError) as error:
        reason = f"{type(error).__name__}: {error}".rstrip(": ")
        if isinstance(error, EOFError | ConnectionError):
            end = time.monotonic() + LAST_WORDS
            while is_alive() and time.monotonic() < end:
                time.sleep(0.01)
            silent = f"the fork server has ended without a word, or did not answer ({reason})"
            reason = error_since(written) or silent
        replace()  # a request that we could not finish ends the server too
        raise RankFailed(
            f"{who} could not be started: {reason}", Report(world_size=0)
        ) from None
    finally:
        timer.cancel()


def is_alive() -> bool:
    """Whether the server still runs."""
    pid = borrowed.fork_server_pid()
    if pid is None or not hasattr(os, "waitid"):  # macOS
        return True
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    return False


def replace() -> None:
    """End the server, whatever state it is in; the next start makes another."""
    end_now()
    # Somebody else may have waited for it, or have removed its socket.
    with suppress(ChildProcessError, FileNotFoundError):
        borrowed.stop_fork_server()
    borrowed.forget_fork_server()


def end_now() -> None:
    """Kill the server; its ranks die with it."""
    pid = borrowed.fork_server_pid()
    if pid is not None and is_alive():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def log() -> str:
    """What the server and the ranks' first instructions have written until now."""
    return files.text_of(kernel_folder() / files.LOG)


def error_since(begin: int) -> str:
    """The last error in the log behind its first characters, with its place, or nothing."""
    text = log()[begin:].strip()
    places = re.findall(r'File "(.*)", line (\d+)', text)
    place = f" ({places[-1][0]}, line {places[-1][1]})" if places else ""
    return text.splitlines()[-1] + place if text else ""


def notebook_kernel() -> Any:
    """The Jupyter kernel that this process is, or None."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None)


def stay_on_this_machine() -> None:
    """Gloo and NCCL meet on the loopback interface, in whatever this process starts.

    Otherwise they take the interface that the machine's name stands for, or any other.
    """
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, files.LOOPBACK)


def end_with(kernel: Any) -> None:
    """Stop ranks, the server and the resource tracker when `kernel` is told to shut down.

    ipykernel ends its children with a signal that the tracker ignores, so that each
    restart would wait for seconds.
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


# In the server


class KernelWatch:
    """When the kernel is gone, kill its ranks, remove its folder, and end.

    A clock's signal looks for the kernel, since ranks may keep open what would tell of
    its end, and no thread of theirs may come to look.
    """

    def __init__(self, kernel: int, folder: Path) -> None:
        self.kernel, self.folder, self.server = kernel, folder, os.getpid()

    def begin(self) -> None:
        """Outlive the kernel by a moment; keep what this process writes in its folder."""
        os.setsid()  # JupyterLab kills a kernel together with its process group
        try:
            with open(self.folder / files.LOG, "ab") as log_file:
                os.dup2(log_file.fileno(), 1)
                os.dup2(log_file.fileno(), 2)
        except FileNotFoundError:  # the kernel has ended meanwhile
            os._exit(0)
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


def preload(*names: str) -> None:
    """Have the server import these modules too, once for all ranks."""
    PRELOAD.extend(names)
    if _is_server:
        _import_for_all(names)


def _import_for_all(names: Iterable[str]) -> None:
    """Import what every rank will need; no garbage is looked for in it, now or in a rank."""
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


_is_server = KERNEL in os.environ and "multiprocessing.forkserver" in sys.orig_argv[-1]
if _is_server:
    _kernel, _folder = os.environ.pop(KERNEL).split(":", 1)  # no rank inherits it
    KernelWatch(int(_kernel), Path(_folder)).begin()
    _import_for_all(PRELOAD)
