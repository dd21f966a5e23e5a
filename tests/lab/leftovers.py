"""What a launch may have left: processes, files, sockets. Of this kernel alone."""

import os
import time
from contextlib import suppress
from multiprocessing import util
from pathlib import Path
from typing import NamedTuple

import psutil


def runs(process: psutil.Process | int) -> bool:
    """Whether the process, or that of this number, is still there and no zombie."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(process) if isinstance(process, int) else process
        return process.status() != psutil.STATUS_ZOMBIE
    return False


class Process(NamedTuple):
    """What /proc says of a process."""

    pid: int
    name: str
    parent: int
    begin: int  # in ticks of the clock

    def read(self, file: str) -> str:
        """The text of a file of it, none if the process has ended or is another user's."""
        with suppress(OSError), open(f"/proc/{self.pid}/{file}", "rb", 0) as text:
            return text.read().decode(errors="replace")
        return ""

    def is_server(self) -> bool:
        """Whether it is a fork server, or a fork of one."""
        return "multiprocessing.forkserver" in self.read("cmdline").replace("\0", " ")


def leftovers() -> list[str]:
    """Processes forked for ranks, files of launches and sockets that are still there."""
    running = _running()
    mine = [p for p in running if p.parent == os.getpid() and p.is_server()]
    family = {p.pid for p in mine}
    while more := {p.pid for p in running if p.parent in family} - family:
        family |= more
    since = next(p.begin for p in running if p.pid == os.getpid())
    others = [p for p in running if p.begin >= since and p not in mine]
    alive = [p for p in others if p.pid in family or _is_ours(p)]
    files = Path(util.get_temp_dir()).glob("launch-*")
    sockets = [socket for server in mine for socket in _sockets(server)]
    return [*map(str, alive), *map(str, files), *sockets]


def _running() -> list[Process]:
    """All processes of this machine, without zombies."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{pid}/stat", "rb", 0) as text:
            begin, _, end = text.read().decode(errors="replace").rpartition(")")
            state, parent, *rest = end.split()
            if state != "Z":
                name = begin.partition("(")[2]
                found.append(Process(int(pid), name, int(parent), int(rest[17])))
    return found


def _is_ours(process: Process) -> bool:
    """Whether it is a fork server of this process, or a fork of one, whoever holds it."""
    variables = process.read("environ").split("\0") if process.is_server() else []
    return any(v.startswith(f"MGPU_KERNEL={os.getpid()}:") for v in variables)


def _sockets(process: Process) -> list[str]:
    """Those of its sockets that are none of this machine alone."""
    links = []
    with suppress(FileNotFoundError):  # it has ended
        for number in os.listdir(folder := f"/proc/{process.pid}/fd"):
            with suppress(FileNotFoundError):  # closed since then
                links.append(os.readlink(f"{folder}/{number}"))
    lines = Path("/proc/net/unix").read_text().splitlines()[1:]
    local = {f"socket:[{line.split()[6]}]" for line in lines}
    return [
        f"{link} of {process}"
        for link in links
        if link.startswith("socket:") and link not in local
    ]


def after(seconds: float, found) -> list:
    """What `found()` still finds after at most so many seconds."""
    end = time.monotonic() + seconds
    while (left := found()) and time.monotonic() < end:
        time.sleep(0.01)
    return left
