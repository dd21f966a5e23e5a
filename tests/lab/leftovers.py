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
    servers = [p for p in psutil.Process().children() if is_forked(p)]
    family = {child for server in servers for child in server.children(recursive=True)}
    alive = [p for p in family | strays() if p not in servers and runs(p)]
    files = Path(util.get_temp_dir()).glob("launch-*")
    sockets = [c for server in servers for c in server.net_connections("inet")]
    return [*map(str, alive), *map(str, files), *map(str, sockets)]


def strays() -> set[psutil.Process]:
    """Fork servers of this process and their forks, whoever is their parent by now."""
    since, mark = psutil.Process().create_time(), f"{os.getpid()}:"
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ours = process.create_time() >= since and is_forked(process)
            if ours and process.environ().get("MGPU_KERNEL", "").startswith(mark):
                found.add(process)
    return found


def is_forked(process: psutil.Process) -> bool:
    """Whether it is a fork server, or a fork of one."""
    with suppress(psutil.Error):
        return "multiprocessing.forkserver" in " ".join(process.cmdline())
    return False


def after(seconds: float, found) -> list:
    """What `found()` still finds after at most so many seconds."""
    end = time.monotonic() + seconds
    while (left := found()) and time.monotonic() < end:
        time.sleep(0.01)
    return left
