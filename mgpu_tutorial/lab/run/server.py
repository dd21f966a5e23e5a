"""The fork server: a process that has imported torch once, and forks every rank.

Both sides are here: `start`, which the kernel calls, and what the server itself does
when it imports this module, before it imports torch. Nothing here may import torch, so
that the server can begin while the kernel is still importing it.

The server outlives a kernel that is killed by just long enough to sweep up after it. The
ranks kill themselves when they see that the kernel is gone; then nobody but the server
can remove the kernel's temporary folder.
"""

import atexit
import multiprocessing as mp
import os
import shutil
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker, util
from pathlib import Path
from typing import Any

METHOD = "spawn" if sys.platform == "win32" else "forkserver"
PRELOAD = [
    "mgpu_tutorial.lab.run.server",
    "torch",
    "torch.distributed",
    "torch._dynamo",  # with the next one: two seconds less for a rank's first DDP
    "torch.nn.parallel.distributed",
    "torch.distributed.pipelining",
    "mgpu_tutorial.shared.vision",  # torchvision: a quarter of a second less for each rank
    "mgpu_tutorial.lab.run.rank",
]
FOLDER = "MGPU_KERNEL_FOLDER"
LOG = "server.log"
LONGEST = 70  # bytes: a socket's path has at most 103, and multiprocessing appends 32
IMPORTS = 5.0  # seconds that the server's imports take, about
_began: list[float] = []


def start() -> None:
    """Have the fork server begin its imports, unless it runs already; returns at once."""
    if METHOD == "forkserver":
        _began.append(time.monotonic())
        mp.get_context(METHOD).set_forkserver_preload(PRELOAD)
        os.environ[FOLDER] = temporary_folder()
        try:
            forkserver.ensure_running()
        finally:
            os.environ.pop(FOLDER, None)


def temporary_folder() -> str:
    """The kernel's temporary folder; in /tmp where TMPDIR is too long for a socket's path."""
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) > LONGEST:
        tempfile.tempdir = "/tmp"
    try:
        return util.get_temp_dir()  # made at the first call, and then the same
    finally:
        tempfile.tempdir = usual


def importing() -> bool:
    """Whether the server probably still imports, so that the kernel has time."""
    return bool(_began) and time.monotonic() < _began[0] + IMPORTS


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
        for stop in (  # not public; and what the one removed, the next may look for
            util._exit_function,
            forkserver._forkserver._stop,
            resource_tracker._resource_tracker._stop,
        ):
            with suppress(Exception):
                stop()
        return shut_down(restart)

    kernel.do_shutdown = stop_first


def sweep(folder: str) -> None:
    """Remove `folder`, again and again while dying ranks still write to it."""
    end = time.monotonic() + 5
    while Path(folder).exists() and time.monotonic() < end:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.01)


def settle(folder: str) -> None:
    """Outlive the kernel; keep what this process writes inside the kernel's own folder."""
    os.setsid()  # JupyterLab kills a kernel together with its process group
    with open(Path(folder, LOG), "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(folder, "inductor")))
    atexit.register(sweep, folder)


if FOLDER in os.environ and "multiprocessing.forkserver" in sys.orig_argv[-1]:
    settle(os.environ.pop(FOLDER))  # popped: no process of a rank inherits it
