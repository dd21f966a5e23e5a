"""What a launch may have left: processes, files, sockets. Of this kernel alone."""

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
    me = psutil.Process()
    children = [p for p in me.children() if runs(p)]
    server = [p for p in children if "forkserver" in " ".join(p.cmdline())]
    alive = [p for s in server for p in s.children(recursive=True) if runs(p)]
    files = Path(util.get_temp_dir()).glob("launch-*")
    sockets = [c for s in server for c in s.net_connections("inet")]
    return [*map(str, alive), *map(str, files), *map(str, sockets)]


def after(seconds: float, found) -> list:
    """What `found()` still finds after at most so many seconds."""
    end = time.monotonic() + seconds
    while found() and time.monotonic() < end:
        time.sleep(0.01)
    return found()
