"""Launching from a real Jupyter kernel: interrupted, and shut down the way Jupyter does."""

import os
import tempfile
from pathlib import Path

import psutil
import pytest
from jupyter_client.manager import start_new_kernel

from tests.lab.run.conftest import after, noted

pytestmark = pytest.mark.slow

SLEEP = """
import sys; sys.path.insert(0, {here!r})
from multiprocessing import forkserver
began = []
begin = forkserver.ensure_running
forkserver.ensure_running = lambda: (began.append("torch" in sys.modules), begin())
import mgpu_tutorial.lab
from tests.lab import ranks
mgpu_tutorial.lab.launch(ranks.sleeper, 2, marker={marker!r})
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A manager and a client of a kernel, and the two ranks that sleep in it."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    with tempfile.TemporaryDirectory() as short:  # where only the kernel writes
        monkeypatch.setenv("TMPDIR", short)
        manager, client = start_new_kernel(kernel_name="python3")
        code = SLEEP.format(here=str(Path(__file__).parents[3]), marker=str(tmp_path / "pid"))
        client.execute(code, stop_on_error=False)  # else the kernel drops what comes next
        assert after(60, lambda: len(noted(tmp_path)) < 2) is False
        yield manager, client, noted(tmp_path)
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def reply_of(client, timeout):
    while (message := client.get_shell_msg(timeout=timeout))["msg_type"] != "execute_reply":
        pass
    return message["content"]


def test_interrupting_a_cell_stops_its_ranks(kernel):
    manager, client, ranks = kernel
    manager.interrupt_kernel()
    reply = reply_of(client, timeout=30)
    assert "\n".join(reply["traceback"]) == f"KeyboardInterrupt: {reply['evalue']}"
    assert "  rank 1 was at ranks.py:" in reply["evalue"]
    assert psutil.wait_procs(ranks, timeout=20)[1] == []
    asked = {"began": "began"}
    client.execute("mgpu_tutorial.lab.launch(ranks.total, 2).results", user_expressions=asked)
    reply = reply_of(client, timeout=60)
    assert reply["status"] == "ok"
    # The fork server began before the kernel imported torch.
    assert reply["user_expressions"]["began"]["data"]["text/plain"].startswith("[False")


@pytest.mark.parametrize("now", [True, False])
def test_shutting_a_kernel_down_takes_ranks_and_files_with_it(kernel, now):
    manager, client, ranks = kernel
    process = psutil.Process(manager.provisioner.process.pid)
    if now:
        manager.shutdown_kernel(now=True)
    else:
        manager.request_shutdown()
    process.wait(timeout=10)  # ipykernel itself waits for 14 s
    assert psutil.wait_procs(ranks, timeout=20)[1] == []
    assert after(20, lambda: list(Path(os.environ["TMPDIR"]).iterdir())) == []
