"""Nothing listens to the network, nobody else's file is run, and no shell reads a string."""

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.lab import RankFailed, launch
from mgpu_tutorial.lab.run import files, server, transfer
from mgpu_tutorial.processes_and_ranks import meeting
from mgpu_tutorial.shared import checkpoint

ROOT = Path(__file__).parents[1]
FOLDERS = ("mgpu_tutorial", "handouts", "tools", "benchmarks", "notebooks")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# What listens


def listening(process: psutil.Process) -> set[str]:
    return {c.laddr.ip for c in process.net_connections("inet") if c.status == "LISTEN"}


NAMES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def interfaces(rank=0, world_size=1):
    return [os.environ[name] for name in NAMES]


@pytest.mark.parametrize("chosen", ["", "ib0"])
def test_processes_of_one_machine_meet_on_loopback(monkeypatch, chosen):
    """Ranks always over gloo; for the rest, what was chosen is kept."""
    for name in NAMES:
        monkeypatch.setenv(name, chosen)
        chosen or monkeypatch.delenv(name)
    nccl = chosen or files.LOOPBACK
    assert launch(interfaces, 1).results == [[files.LOOPBACK, nccl]]
    server.stay_on_this_machine()
    assert interfaces() == [nccl, nccl]


def stores(rank, world_size, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo")
    return listening(psutil.Process())


def test_pytorchs_own_store_listens_everywhere_and_ours_does_not():
    """Where the first half fails, PyTorch has mended it: say so in README and notebook 00."""
    me, before = psutil.Process(), listening(psutil.Process())
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert listening(me) - before & {"::", "0.0.0.0"}
    del store
    assert launch(stores, 1, meeting.free_port(), backend="none").results == [{"127.0.0.1"}]


# Whose files are read


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777, 0o720, 0o702])
def test_a_folder_is_taken_unless_others_may_write_to_it(tmp_path, mode):
    transfer.write([1, 2], tmp_path / "result", "the result")
    tmp_path.chmod(mode)
    if not mode & 0o022:
        assert transfer.read(tmp_path / "result") == [1, 2]
        return
    with pytest.raises(PermissionError, match="not a folder of yours alone"):
        transfer.read(tmp_path / "result")


def test_a_folder_of_somebody_else_or_a_link_in_its_place_is_refused(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(PermissionError, match="not a folder of yours alone"):
        files.require_private(tmp_path / "link")
    somebody = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: somebody)
    for use in (files.kernel_folder, lambda: files.require_private(tmp_path)):
        with pytest.raises(PermissionError, match="not a folder of yours alone"):
            use()


def modes(rank, world_size):
    home = Path(os.environ["MGPU_RANK_FOLDER"])
    folders = (home, home.parent, home.parent.parent)  # a rank's, a launch's, the kernel's
    return [folder.stat().st_mode & 0o777 for folder in folders]


def test_the_folders_of_a_launch_are_private_whatever_the_umask():
    before = os.umask(0)
    try:
        assert launch(modes, 2).results == [[0o700] * 3] * 2
    finally:
        os.umask(before)


class Bomb:
    """A pickle that makes a file where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def load(rank, world_size, path):
    model = nn.Linear(1, 1)
    checkpoint.load(path, model, torch.optim.SGD(model.parameters()))


def test_a_checkpoint_runs_no_code(tmp_path):
    torch.save({"model": Bomb(tmp_path / "boom"), "optimizer": {}}, tmp_path / "run.pt")
    with pytest.raises(RankFailed, match="holds no readable checkpoint"):
        launch(load, 1, str(tmp_path / "run.pt"))
    assert not (tmp_path / "boom").exists()
    pickle.loads(pickle.dumps(Bomb(tmp_path / "boom")))
    assert (tmp_path / "boom").exists()  # and so it would have gone off


def save(rank, world_size, path, name):
    checkpoint.uuid4 = lambda: SimpleNamespace(hex=name)
    model = nn.Linear(1, 1)
    checkpoint.save(path, model, torch.optim.SGD(model.parameters()))


def test_a_checkpoint_is_not_written_through_a_link(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run.pt.guessed.draft").symlink_to(tmp_path / "precious")
    with pytest.raises(RankFailed, match="FileExistsError"):
        launch(save, 1, str(tmp_path / "run.pt"), "guessed")
    assert (tmp_path / "precious").read_text() == "mine"
    (tmp_path / "run.pt").symlink_to(tmp_path / "precious")
    launch(save, 1, str(tmp_path / "run.pt"), "not guessed")
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "run.pt").is_symlink()


# What the code says

RULES = "S301,S302,S602,S604,S605"  # of ruff: a pickle is read, a shell gets a text
MORE = r"weights_only\s*=(?!\s*True)|cloudpickle\.loads?\(|joblib|create_subprocess_shell"


def test_nothing_runs_a_shell_and_pickles_are_read_in_one_place_only():
    command = [Path(sys.executable).parent / "ruff", "check", "--isolated", "--ignore-noqa"]
    command += ["--select", RULES, "--output-format=concise", *FOLDERS]
    said = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout
    found = {line.split(":")[0] for line in said.splitlines() if ": S" in line}
    found |= {
        str(path.relative_to(ROOT)) for path in FILES if re.search(MORE, path.read_text())
    }
    assert sorted(found) == [
        "mgpu_tutorial/lab/run/transfer.py"  # from a folder that nobody else can write
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_no_shell_and_unpickles_nothing(path):
    for cell in nbformat.read(path, as_version=4).cells:
        lines = cell.source.splitlines() if cell.cell_type == "code" else []
        assert not [line for line in lines if line.lstrip().startswith(("!", "%"))]
        assert not [line for line in lines if re.search(MORE, line)]
