"""Nothing listens to the network, nobody else's file is run, and no shell reads a string."""

import ast
import os
import pickle
from pathlib import Path

import nbformat
import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from mgpu_tutorial.lab import RankFailed, launch
from mgpu_tutorial.lab.run import files, server, transfer
from mgpu_tutorial.processes_and_ranks import meeting
from mgpu_tutorial.shared import checkpoint

ROOT = Path(__file__).parents[1]
FOLDERS = ("mgpu_tutorial", "handouts", "tools", "benchmarks")
FILES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

# What listens


def listening(process: psutil.Process) -> set[str]:
    return {c.laddr.ip for c in process.net_connections("inet") if c.status == "LISTEN"}


def listen_and_tell(rank, path):
    """A process of `mp.spawn` with a group of gloo; says in a file where it listens."""
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    Path(f"{path}.{rank}").write_text(" ".join(listening(psutil.Process())))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_what_a_notebook_spawns_listens_on_loopback_only(tmp_path, monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    server.stay_on_this_machine()  # what importing lab does in a notebook
    mp.spawn(listen_and_tell, (str(tmp_path / "meet"),), nprocs=2)
    told = [(tmp_path / f"meet.{rank}").read_text() for rank in range(2)]
    assert told == ["127.0.0.1"] * 2


def interfaces(rank, world_size):
    return os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]


def test_ranks_of_one_machine_meet_on_loopback(monkeypatch):
    """Gloo whatever was chosen; NCCL, which takes it almost last, unless it was."""
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert launch(interfaces, 1).results == [(files.LOOPBACK, files.LOOPBACK)]
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert launch(interfaces, 1).results == [(files.LOOPBACK, "ib0")]


def test_an_interface_that_was_chosen_is_kept(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    server.stay_on_this_machine()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "ib0"
    assert os.environ["NCCL_SOCKET_IFNAME"] == files.LOOPBACK


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


def test_a_folder_of_somebody_else_is_refused(tmp_path, monkeypatch):
    somebody = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: somebody)
    with pytest.raises(PermissionError, match="not a folder of yours alone"):
        files.kernel_folder()
    with pytest.raises(PermissionError, match="not a folder of yours alone"):
        files.require_private(tmp_path)


def test_a_link_in_the_place_of_a_folder_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    with pytest.raises(PermissionError, match="not a folder of yours alone"):
        files.require_private(tmp_path / "link")


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


def save(rank, world_size, path):
    model = nn.Linear(1, 1)
    checkpoint.save(path, model, torch.optim.SGD(model.parameters()))


def test_a_checkpoint_is_not_written_through_a_link(tmp_path):
    (tmp_path / "precious").write_text("mine")
    (tmp_path / "run.pt.draft").symlink_to(tmp_path / "precious")
    launch(save, 1, str(tmp_path / "run.pt"))
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (tmp_path / "run.pt").is_symlink()


# What the code says


def calls_of(text: str) -> list[ast.Call]:
    return [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]


def runs_a_shell(call: ast.Call) -> bool:
    """Whether a call hands a text to a shell: os.system, os.popen, shell=True."""
    shell = any(
        k.arg == "shell" and not (isinstance(k.value, ast.Constant) and not k.value.value)
        for k in call.keywords
    )
    return shell or ast.unparse(call.func) in (
        *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput"),
        *("asyncio.create_subprocess_shell", "get_ipython().system"),
    )


def unpickles(call: ast.Call) -> bool:
    """Whether a call reads a pickle that may run code."""
    name = ast.unparse(call.func)
    trusts = any(
        k.arg == "weights_only" and ast.unparse(k.value) != "True" for k in call.keywords
    )
    modules = ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")
    whole = name.rpartition(".")[0] in modules and name.endswith(("load", "loads", "open"))
    return trusts or whole


def test_the_walk_finds_shells_and_pickles():
    shells = ["subprocess.run('ls', shell=True)", "os.system('ls')"]
    pickles = ["torch.load(path, weights_only=False)", "pickle.load(file)"]
    good = ["subprocess.run(['ls'], shell=False)", "torch.load(path)", "json.load(file)"]
    found = calls_of("\n".join([*shells, *pickles, *good]))
    assert [runs_a_shell(call) for call in found] == [True] * 2 + [False] * 5
    assert [unpickles(call) for call in found] == [False] * 2 + [True] * 2 + [False] * 3


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_runs_no_shell_and_unpickles_in_one_place_only(path):
    calls = calls_of(path.read_text(encoding="utf-8"))
    assert not [ast.unparse(call) for call in calls if runs_a_shell(call)]
    known = {
        # what ranks return, from a folder that nobody else can write
        "mgpu_tutorial/lab/run/transfer.py": [
            "torch.load(path, map_location='cpu', weights_only=False)"
        ],
        # out of this process's own memory
        "mgpu_tutorial/when_it_breaks/record.py": ["pickle.loads(borrowed.flight_record())"],
    }
    found = [ast.unparse(call) for call in calls if unpickles(call)]
    assert found == known.get(path.relative_to(ROOT).as_posix(), [])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_no_shell_and_unpickles_nothing(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            lines = cell.source.splitlines()
            assert not [line for line in lines if line.lstrip().startswith(("!", "%"))]
            calls = calls_of("\n".join(lines))
            bad = [call for call in calls if runs_a_shell(call) or unpickles(call)]
            assert not [ast.unparse(call) for call in bad]
