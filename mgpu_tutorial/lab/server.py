"""Imported once by the fork server, before it imports torch and forks any rank.

The fork server outlives a kernel that is killed by just long enough to sweep up
after it. The ranks kill themselves when they see that the kernel is gone; then
nobody but the server can remove the kernel's temporary folder.
"""

import atexit
import os
import shutil
import sys
import time
from pathlib import Path

FOLDER = "MGPU_KERNEL_FOLDER"
LOG = "server.log"


def sweep(folder: str) -> None:
    """Remove `folder`, again and again while dying ranks still write to it."""
    end = time.monotonic() + 5
    while Path(folder).exists() and time.monotonic() < end:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.01)


def settle(folder: str) -> None:
    """Keep what this process writes, or caches, inside the kernel's temporary folder."""
    with open(Path(folder, LOG), "wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(folder, "inductor")))
    atexit.register(sweep, folder)


if FOLDER in os.environ and "multiprocessing.forkserver" in sys.orig_argv[-1]:
    settle(os.environ.pop(FOLDER))  # popped: no process of a rank inherits it
