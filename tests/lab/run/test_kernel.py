"""Launching from a real Jupyter kernel: interrupted, and shut down the way Jupyter does."""

import os
import tempfile
import time
from pathlib import Path
from textwrap import dedent

import psutil
import pytest
from jupyter_client.manager import start_new_kernel

pytestmark = pytest.mark.slow

SLEEP = """
import sys; sys.path.insert(0, {here!r})
from tests.lab import ranks
from mgpu_tutorial.lab import launch
launch(ranks.sleeper, 2, marker={marker!r})
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", None)
    with tempfile.TemporaryDirectory() as short:  # sockets have paths of 107 bytes at most
        monkeypatch.setenv("TMPDIR", short)
        manager, client = start_new_kernel(kernel_name="python3")
        yield manager, client, tmp_path
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def begin_to_sleep(client, folder):
    here = str(Path(__file__).parents[3])
    code = SLEEP.format(here=here, marker=str(folder / "pid"))
    client.execute(code, stop_on_error=False)  # else the kernel drops what comes next
    end = time.monotonic() + 60
    while len(list(folder.glob("pid.*"))) < 2 and time.monotonic() < end:
        time.sleep(0.05)
    return [psutil.Process(int(path.read_text())) for path in folder.glob("pid.*")]


def reply_of(client, timeout):
    while (message := client.get_shell_msg(timeout=timeout))["msg_type"] != "execute_reply":
        pass
    return message["content"]


def test_interrupting_a_cell_stops_its_ranks(kernel):
    manager, client, folder = kernel
    ranks = begin_to_sleep(client, folder)
    manager.interrupt_kernel()
    reply = reply_of(client, timeout=30)
    assert "\n".join(reply["traceback"]) == f"KeyboardInterrupt: {reply['evalue']}"
    assert "  rank 1 was at ranks.py:" in reply["evalue"]
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert len(ranks) == 2 and alive == []
    client.execute("launch(ranks.total, 2).results")
    assert reply_of(client, timeout=60)["status"] == "ok"


@pytest.mark.parametrize("now", [True, False])
def test_shutting_a_kernel_down_takes_ranks_and_files_with_it(kernel, now):
    manager, client, folder = kernel
    ranks = begin_to_sleep(client, folder)
    manager.shutdown_kernel(now=now)
    _, alive = psutil.wait_procs(ranks, timeout=20)
    assert len(ranks) == 2 and alive == []
    end = time.monotonic() + 20
    temporary = Path(os.environ["TMPDIR"])
    while list(temporary.iterdir()) and time.monotonic() < end:
        time.sleep(0.05)
    assert list(temporary.iterdir()) == []


def test_the_fork_server_begins_before_the_kernel_imports_torch(kernel):
    _, client, _ = kernel
    code = """
    import sys
    from multiprocessing import forkserver
    began = []
    begin = forkserver.ensure_running
    forkserver.ensure_running = lambda: (began.append("torch" in sys.modules), begin())
    import mgpu_tutorial.lab
    """
    client.execute(dedent(code), user_expressions={"began": "began"})
    assert reply_of(client, timeout=60)["user_expressions"]["began"]["data"] == {
        "text/plain": "[False]"
    }


def test_a_kernel_shuts_down_without_waiting_to_be_killed(kernel):
    manager, client, _ = kernel
    client.execute("from mgpu_tutorial.lab import launch\nlaunch(print, 1)")
    reply_of(client, timeout=60)
    manager.request_shutdown()
    process = psutil.Process(manager.provisioner.process.pid)
    process.wait(timeout=10)  # ipykernel itself waits for 14 s
