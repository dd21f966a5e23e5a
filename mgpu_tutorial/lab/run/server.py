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
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from types import FrameType
from typing import Any

import mgpu_tutorial
from mgpu_tutorial.lab import borrowed

METHOD = "spawn" if sys.platform == "win32" else "forkserver"
PRELOAD = [
    "mgpu_tutorial.lab.run.server",
    "torch",
    "torch.distributed",
    "torch._dynamo",  # with the next one: two seconds less for a rank's first DDP
    "torch.nn.parallel.distributed",
    "torch.distributed.pipelining",
    "torch.utils.serialization.config",  # torch.load imports it at its first call
    *mgpu_tutorial.PRELOAD,
    "mgpu_tutorial.lab.run.rank",
]
KERNEL = "MGPU_KERNEL"  # in the server's environment: the kernel's process and folder
# In the server's environment too: glibc asks for huge pages, so that a rank is forked sooner.
HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
LOG = "server.log"
WARM = "warm"
LONGEST = 70  # bytes: a socket's path has at most 103, and multiprocessing appends 32
IMPORTS = 5.0  # seconds that the server's imports take, about
LOOK = 0.5  # seconds between two looks of the server whether the kernel still lives
_began: list[tuple[int, float]] = []  # the process and the moment of each start


def start() -> None:
    """Have the fork server begin its imports, unless it runs already; returns at once.

    Raises RuntimeError where no server can be started here.
    """
    if METHOD != "forkserver":
        return
    if _began and _began[-1][0] != os.getpid():
        raise RuntimeError(
            "launch() was called in a process forked from one that had launched ranks. "
            "Launch from the first one, or from a program of its own."
        )
    _replace_if_unreachable()
    _began.append((os.getpid(), time.monotonic()))
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


def kernel_folder() -> Path:
    """The temporary folder of this process, made again where somebody has removed it.

    A child of another program shares multiprocessing's folder with it, and has a
    folder of its own inside.
    """
    folder = Path(_temporary_folder())
    if mp.parent_process() is not None:
        folder = folder / f"child-{os.getpid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    require_private(folder)
    return folder


def require_private(folder: Path) -> None:
    """PermissionError where another user could put a file into `folder`.

    What ranks and kernel exchange there are pickles, which run code when they are read.
    """
    if not hasattr(os, "getuid"):  # Windows
        return
    found = folder.lstat()
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not mine or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{folder} is not a folder of yours alone: another user could put files into it "
            "that your ranks would run. Remove it, or set TMPDIR to a folder of your own."
        )


def stay_on_this_machine() -> None:
    """Gloo listens on the loopback interface, in whatever program this process starts.

    Otherwise it takes the interface that the machine's name stands for.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)


def _temporary_folder() -> str:
    """multiprocessing's folder; in /tmp where TMPDIR is too long for a socket's path."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) > LONGEST:
        tempfile.tempdir = "/tmp"
    try:
        return util.get_temp_dir()  # made at the first call, and then the same
    finally:
        tempfile.tempdir = usual


def _replace_if_unreachable() -> None:
    """End a server whose socket somebody has removed, so that the next start makes one."""
    address = borrowed.fork_server_address()
    if borrowed.fork_server_pid() is None or not address or Path(address).exists():
        return
    replace()


def replace() -> None:
    """End the server, whatever state it is in; the next start makes another."""
    address = borrowed.fork_server_address()
    end_now()
    if address:
        kernel_folder()
        Path(address).touch()  # what the server's end is going to remove
    with suppress(ChildProcessError):
        borrowed.stop_fork_server()


def is_warm() -> bool:
    """Whether this very server has done its imports and has forked a process."""
    path = kernel_folder() / WARM
    return path.exists() and path.read_text() == str(borrowed.fork_server_pid())


def note_warm() -> None:
    """Remember that this server has done its imports."""
    (kernel_folder() / WARM).write_text(str(borrowed.fork_server_pid()))


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


def is_alive() -> bool:
    """Whether the server still runs."""
    pid = borrowed.fork_server_pid()
    if METHOD != "forkserver" or pid is None or not hasattr(os, "waitid"):
        return True
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    return False


def await_end(seconds: float) -> None:
    """Give a server that hung up the time to end, so that its last words are in the log."""
    end = time.monotonic() + seconds
    while is_alive() and time.monotonic() < end:
        time.sleep(0.01)


def log_size() -> int:
    """How much the server and the ranks' first instructions have written until now."""
    path = kernel_folder() / LOG
    return path.stat().st_size if path.exists() else 0


def log(begin: int) -> str:
    """The last line of what they have written since then; empty where there is none."""
    path = kernel_folder() / LOG
    text = (
        path.read_bytes()[begin:].decode("utf-8", errors="replace") if path.exists() else ""
    )
    return text.strip().splitlines()[-1] if text.strip() else ""


def disk_is_full(folder: Path) -> bool:
    """Whether so little is left that a rank cannot write how it ended."""
    with suppress(OSError):
        return shutil.disk_usage(folder).free < 2**16
    return False


def end_group(leader: int) -> None:
    """Kill what a rank that has ended left in its process group.

    As long as the group lives, no other process gets its number; a process of that
    number is therefore a stranger's.
    """
    if not hasattr(os, "killpg"):
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, 0)
        try:
            os.kill(leader, 0)
        except ProcessLookupError:
            os.killpg(leader, signal.SIGKILL)


def importing() -> bool:
    """Whether the server probably still imports, so that the kernel has time."""
    return bool(_began) and time.monotonic() < _began[0][1] + IMPORTS


def notebook_kernel() -> Any:
    """The Jupyter kernel that this process is, or None."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None)


def end_with(kernel: Any) -> None:
    """Stop the server, and the resource tracker, when `kernel` is told to shut down.

    ipykernel ends its children with a signal that the tracker ignores, so that each
    restart would wait for seconds.
    """
    shut_down = kernel.do_shutdown

    def stop_first(restart: bool) -> Any:
        for stop in (  # what the one removed, the next may look for
            end_launches,
            borrowed.run_exit_handlers,
            borrowed.stop_fork_server,
            borrowed.stop_resource_tracker,
        ):
            with suppress(Exception):
                stop()
        return shut_down(restart)

    kernel.do_shutdown = stop_first


def end_launches() -> None:
    """Kill the ranks of a launch in another thread, so that it ends before what it uses."""
    end = time.monotonic() + 5
    while any(kernel_folder().glob("launch-*")) and time.monotonic() < end:
        kill_ranks(kernel_folder())
        time.sleep(0.02)


def kill_ranks(folder: Path) -> None:
    """Kill the process groups of all ranks that run below a kernel's folder."""
    for path in folder.glob("launch-*/rank*/pid"):
        with suppress(ValueError, OSError):
            os.killpg(int(path.read_text()), signal.SIGKILL)


def sweep(folder: str) -> None:
    """Remove `folder`, again and again while dying ranks still write to it."""
    end = time.monotonic() + 5
    while Path(folder).exists() and time.monotonic() < end:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.01)


def detach_from_kernel(kernel: int, folder: str) -> None:
    """Outlive the kernel by a moment; keep what this process writes in its folder.

    A clock's signal looks for the kernel, since ranks may keep open what would tell of
    its end, and no thread of theirs may come to look.
    """
    os.setsid()  # JupyterLab kills a kernel together with its process group
    try:
        with open(Path(folder, LOG), "ab") as log_file:
            os.dup2(log_file.fileno(), 1)
            os.dup2(log_file.fileno(), 2)
    except FileNotFoundError:  # the kernel has ended meanwhile
        os._exit(0)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(folder, "inductor")))
    server = os.getpid()

    def kernel_is_gone() -> bool:
        return os.getppid() != kernel

    def end_if_alone() -> None:
        if kernel_is_gone():
            signal.setitimer(signal.ITIMER_REAL, 0)
            kill_ranks(Path(folder))
            sweep(folder)
            os._exit(0)

    def look(number: int, frame: FrameType | None) -> None:
        if os.getpid() == server:
            end_if_alone()

    def sweep_at_exit() -> None:
        if os.getpid() == server:
            Path(folder, WARM).unlink(missing_ok=True)
        end = time.monotonic() + 1  # a kernel that ends closes its files before it is gone
        while os.getpid() == server and Path(folder).exists() and time.monotonic() < end:
            end_if_alone()
            time.sleep(0.01)

    atexit.register(sweep_at_exit)
    signal.signal(signal.SIGALRM, look)
    signal.siginterrupt(signal.SIGALRM, False)  # C code that reads need not know of it
    signal.setitimer(signal.ITIMER_REAL, LOOK, LOOK)


def import_for_all() -> None:
    """Import what every rank will need; no garbage is looked for in it, now or in a rank."""
    gc.disable()
    try:
        for name in PRELOAD:
            importlib.import_module(name)
    finally:
        gc.freeze()
        gc.enable()


if KERNEL in os.environ and "multiprocessing.forkserver" in sys.orig_argv[-1]:
    # popped: no process of a rank inherits it
    _kernel, _folder = os.environ.pop(KERNEL).split(":", 1)
    detach_from_kernel(int(_kernel), _folder)
    import_for_all()
