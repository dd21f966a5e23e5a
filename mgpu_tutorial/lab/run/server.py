"""The fork server: a process that has imported torch once, and forks every rank.

Both sides are here: `start`, which the kernel calls, and what the server itself does
when it imports this module, before it imports torch. Nothing here may import torch, so
that the server can begin while the kernel is still importing it.

The server outlives a kernel that is killed by just long enough to end its ranks and to
remove the kernel's temporary folder, for nobody else could.
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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from mgpu_tutorial.lab import borrowed
from mgpu_tutorial.lab.run import files
from mgpu_tutorial.lab.run.files import kernel_folder

METHOD = "spawn" if sys.platform == "win32" else "forkserver"
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
IMPORTS = 5.0  # seconds that the server's imports take, about
_started: dict[int, float] = {}  # the moment of the first start, by process
_warm: set[int | None] = set()  # servers that have done their imports and forked a process


# In the kernel


def start() -> None:
    """Have the fork server begin its imports, unless it runs already; returns at once.

    Raises RuntimeError where no server can be started here.
    """
    if METHOD != "forkserver":
        return
    if _started.keys() - {os.getpid()}:
        raise RuntimeError(
            "launch() was called in a process forked from one that had launched ranks. "
            "Launch from the first one, or from a program of its own."
        )
    _started.setdefault(os.getpid(), time.monotonic())
    address = borrowed.fork_server_address()
    if borrowed.fork_server_pid() is not None and address and not Path(address).exists():
        replace()  # somebody has removed its socket
    mp.get_context(METHOD).set_forkserver_preload(PRELOAD)
    resource_tracker.ensure_running()  # its start would undo the mask
    given = {KERNEL: f"{os.getpid()}:{kernel_folder()}", **HUGE_PAGES}
    given = {name: text for name, text in given.items() if name not in os.environ}
    os.environ.update(given)
    # Ctrl-C is for the kernel; the server's first instructions would die of it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        try:
            forkserver.ensure_running()
        except ChildProcessError:  # it has ended, and somebody else has waited for it
            borrowed.forget_fork_server()
            forkserver.ensure_running()
    finally:
        for name in given:
            del os.environ[name]
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def await_server() -> None:
    """Start the server and wait for its imports; Ctrl-C may reach this wait.

    A server that ended since the last launch, or does not answer, is replaced once.
    """
    from mgpu_tutorial.lab.run import errors  # which imports torch

    for attempt in (1, 2):
        start()
        if METHOD != "forkserver" or borrowed.fork_server_pid() in _warm:
            return
        begin = log_size()
        if notebook_kernel() and time.monotonic() < _started[os.getpid()] + IMPORTS:
            _import_meanwhile()
        first = mp.get_context(METHOD).Process(target=time.sleep, args=(0,), daemon=True)
        try:
            with answering_within(SERVER_LIMIT):
                first.start()
                first.join()
            if first.exitcode == 255:  # what is told of a process whose server has ended
                raise EOFError
            _warm.add(borrowed.fork_server_pid())
            return
        except (OSError, EOFError) as error:
            await_end()
            replace()
            if attempt == 2:
                said = log(begin)
                raise errors.not_started("the fork server", error, said) from None
        finally:
            if first.is_alive():
                first.kill()


def _import_meanwhile() -> None:
    """Import what the next cells need and what takes long: for drawings, for comparisons."""
    import matplotlib.figure  # noqa: F401
    import sympy  # noqa: F401  torch.testing.assert_close needs it


def is_alive() -> bool:
    """Whether the server still runs."""
    pid = borrowed.fork_server_pid()
    if METHOD != "forkserver" or pid is None or not hasattr(os, "waitid"):
        return True
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    return False


def await_end() -> None:
    """Give a server that hung up the time to end, so that its last words are in the log."""
    end = time.monotonic() + LAST_WORDS
    while is_alive() and time.monotonic() < end:
        time.sleep(0.01)


def replace() -> None:
    """End the server, whatever state it is in; the next start makes another."""
    address = borrowed.fork_server_address()
    end_now()
    if address:
        kernel_folder()
        Path(address).touch()  # what the server's end is going to remove
    with suppress(ChildProcessError):
        borrowed.stop_fork_server()


def end_now() -> None:
    """Kill the server; its ranks die with it."""
    pid = borrowed.fork_server_pid()
    if pid is not None and is_alive():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def answering_within(seconds: float) -> Iterator[None]:
    """Kill a server that answers too late: whoever waits for it then gets an EOFError."""
    timer = threading.Timer(seconds, end_now)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def log_size() -> int:
    """How much the server and the ranks' first instructions have written until now."""
    path = kernel_folder() / files.LOG
    return path.stat().st_size if path.exists() else 0


def log(begin: int) -> str:
    """The error that they have written since then, with its place; empty without one."""
    path = kernel_folder() / files.LOG
    written = path.read_bytes()[begin:] if path.exists() else b""
    text = written.decode("utf-8", errors="replace").strip()
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
    """Stop the server, and the resource tracker, when `kernel` is told to shut down.

    ipykernel ends its children with a signal that the tracker ignores, so that each
    restart would wait for seconds.
    """
    shut_down = kernel.do_shutdown

    def stop_first(restart: bool) -> Any:
        for stop in (  # what the one removed, the next may look for
            _end_launches,
            borrowed.run_exit_handlers,
            borrowed.stop_fork_server,
            borrowed.stop_resource_tracker,
        ):
            with suppress(Exception):
                stop()
        return shut_down(restart)

    kernel.do_shutdown = stop_first


def _end_launches() -> None:
    """Kill running ranks and wait until the launching thread has cleaned up."""
    end = time.monotonic() + files.SWEEP_LIMIT
    while any(kernel_folder().glob(f"{files.LAUNCHES}*")) and time.monotonic() < end:
        kill_ranks(kernel_folder())
        time.sleep(0.02)


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
        if os.getpid() == self.server:
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
