"""What a launch may have left: processes, files, sockets. Of this kernel alone."""

import os
import time
from contextlib import suppress
from multiprocessing import util
from pathlib import Path

import psutil


def runs(process: psutil.Process | int) -> bool:
    """Whether the process, or that of this number, is still there and no zombie."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def leftovers() -> list[str]:
    """Processes forked for ranks, files of launches and sockets that are still there."""
    try:
        children = [p for p in psutil.Process().children() if runs(p)]
        server = [p for p in children if "forkserver" in " ".join(p.cmdline())]
        alive = {p for s in server for p in s.children(recursive=True) if runs(p)}
        sockets = [c for s in server for c in s.net_connections("inet")]
    except psutil.Error:
        return ["a process that ended while its children were counted"]
    alive |= {p for p in psutil.process_iter() if p not in server and _is_ours(p)}
    files = Path(util.get_temp_dir()).glob("launch-*")
    return [*map(str, alive), *map(str, files), *map(str, sockets)]


def _is_ours(process: psutil.Process) -> bool:
    """Whether a fork server of this process, or a fork of one, is there, whoever holds it."""
    with suppress(psutil.Error):
        if "multiprocessing.forkserver" in " ".join(process.cmdline()) and runs(process):
            kernel, _, _ = process.environ().get("MGPU_KERNEL", "").partition(":")
            return kernel == str(os.getpid())
    return False


def after(seconds: float, found) -> list:
    """What `found()` still finds after at most so many seconds."""
    end = time.monotonic() + seconds
    while (left := found()) and time.monotonic() < end:
        time.sleep(0.01)
    return left
