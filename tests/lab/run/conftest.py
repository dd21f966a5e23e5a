"""After each test of the launcher nothing is left: no process, no file, no socket."""

import os
import subprocess
import sys
import tempfile
import textwrap
import time
from contextlib import suppress
from multiprocessing import util
from pathlib import Path

import psutil
import pytest

from mgpu_tutorial.lab import launch
from tests.lab.ranks import total


@pytest.fixture
def tmp_path():
    """A folder with a short name: sockets stand in it, whose paths have 107 bytes at most."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as short:
        yield Path(short).resolve()


@pytest.fixture(scope="session", autouse=True)
def warm():
    launch(total, 2)


@pytest.fixture(autouse=True)
def nothing_is_left(warm, tmp_path_factory, monkeypatch):
    """After every test, whatever it called: no process and no file of ours is there."""
    temporary = tmp_path_factory.mktemp("tmp")  # other programs write to the usual one
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield
    assert after(5, leftovers) == []
    assert list(temporary.iterdir()) == []


def noted(folder: Path) -> list[psutil.Process]:
    """The processes whose numbers stand in files pid.* of this folder, and that still run."""
    found = []
    for path in folder.glob("pid.*"):
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(int(path.read_text())))
    return [process for process in found if runs(process)]


def runs(process: psutil.Process) -> bool:
    """Whether the process is still there and no zombie."""
    with suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def leftovers() -> list[str]:
    """Forks of fork servers of this process, whoever is their parent, files and sockets."""
    since, mark = psutil.Process().create_time(), f"{os.getpid()}:"
    servers = [p for p in psutil.Process().children() if is_forked(p)]
    family = {child for server in servers for child in server.children(recursive=True)}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ours = process.create_time() >= since and is_forked(process)
            if ours and process.environ().get("MGPU_KERNEL", "").startswith(mark):
                family.add(process)
    alive = [p for p in family if p not in servers and runs(p)]
    files = Path(util.get_temp_dir()).glob("launch-*")
    sockets = [c for server in servers for c in server.net_connections("inet")]
    return [*map(str, alive), *map(str, files), *map(str, sockets)]


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


def start(source: str, folder: Path, **options: object) -> subprocess.Popen:
    """Start a program that stands in `folder`, and its temporary folder inside of that."""
    path = folder / "program.py"
    path.write_text(textwrap.dedent(source))
    (folder / "tmp").mkdir(exist_ok=True)
    settings = {"PYTHONPATH": str(Path(__file__).parents[3]), "TMPDIR": str(folder / "tmp")}
    options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, path]
    return subprocess.Popen(command, cwd=folder, env=os.environ | settings, **options)
