"""The files through which a kernel and its ranks talk: `lab/README.md` says what they hold.

Nothing here may import torch: the fork server reads this module before it does.
"""

import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path

# In the folder of a kernel
LOG = "server.log"
LAUNCHES = "launch-"  # and some letters: a folder for each launch

# In the folder of a launch
PAYLOAD = "payload"
STORE = "store"
TEMPORARY = "tmp"

# In the folder of a rank
PID = "pid"
STDOUT = "stdout"
STDERR = "stderr"
WHERE = "where"
STACK = "stack"
READY = "ready"
EVENTS = "events"
STATUS = "status"
RESULT = "result"
OUTCOME = "outcome"

FOLDER = "MGPU_RANK_FOLDER"  # in a rank's environment: its folder
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # where ranks listen
OUTPUT_LIMIT = 32 * 2**20  # bytes that one rank may print
SWEEP_LIMIT = 5.0  # seconds in which a folder must be gone


@dataclass(frozen=True)
class Job:
    """What a rank must know before it can load its worker."""

    folder: Path
    rank: int
    device: str
    world_size: int
    backend: str
    trace: bool

    @property
    def home(self) -> Path:
        return home_of(self.folder, self.rank)


def home_of(folder: Path, rank: int) -> Path:
    """The folder of a rank, in that of its launch."""
    return folder / f"rank{rank}"


@contextmanager
def workspace(world_size: int) -> Iterator[Path]:
    """A folder for one launch, inside the kernel's own temporary folder, then gone."""
    folder = Path(tempfile.mkdtemp(prefix=LAUNCHES, dir=kernel_folder()))
    try:
        for rank in range(world_size):
            home_of(folder, rank).mkdir(mode=0o700)  # whatever the umask
        (folder / TEMPORARY).mkdir()
        yield folder
    finally:
        sweep(folder)


def kernel_folder() -> Path:
    """The temporary folder of this process, made again where somebody has removed it."""
    folder = Path(util.get_temp_dir())
    # A socket's path has 103 bytes at most on macOS, of which 18 are /listener-abcdefgh.
    if len(bytes(folder)) > 85:
        raise OSError(f"{folder} is too long a name for sockets: set TMPDIR to a short one.")
    folder.mkdir(mode=0o700, exist_ok=True)
    require_private(folder)
    return folder


def require_private(folder: Path) -> None:
    """PermissionError where another user could put a file into `folder`.

    What ranks and kernel exchange there are pickles, which run code when they are read.
    """
    found = folder.lstat()
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if not mine or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{folder} is not a folder of yours alone: another user could put files into it "
            "that your ranks would run. Remove it, or set TMPDIR to a folder of your own."
        )


def sweep(folder: Path) -> None:
    """Remove `folder`, again and again while dying ranks still write to it."""
    end = time.monotonic() + SWEEP_LIMIT
    while folder.exists() and time.monotonic() < end:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            time.sleep(0.01)


def text_of(path: Path) -> str:
    """What a rank wrote to one of its files, up to OUTPUT_LIMIT; empty without the file."""
    try:
        with open(path, "rb") as file:
            text = file.read(OUTPUT_LIMIT).decode("utf-8", errors="replace")
            return text + ("\n… cut here\n" if file.read(1) else "")
    except FileNotFoundError:
        return ""


def write_whole(path: Path, text: str) -> None:
    """Write a file that others read: they see the whole of it, or none."""
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(draft, path)
