"""Runs in the fork server: when the kernel is gone, however it went, sweep up.

The fork server outlives a kernel that is killed by just long enough. The ranks
kill themselves when they see that the kernel is gone; then nobody but the server
can remove the kernel's temporary folder.
"""

import atexit
import os
import shutil
import time

FOLDER = "MGPU_KERNEL_FOLDER"


def sweep(folder: str) -> None:
    """Remove `folder`, again and again while dying ranks still write to it."""
    end = time.monotonic() + 5
    while os.path.exists(folder) and time.monotonic() < end:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.01)


if FOLDER in os.environ:
    atexit.register(sweep, os.environ[FOLDER])
