"""Launching from a real Jupyter kernel: interrupted, and shut down the way Jupyter does."""

import os
import tempfile
from pathlib import Path

import psutil
import pytest
from jupyter_client.manager import start_new_kernel

from tests.lab.run.conftest import after, noted

pytestmark = pytest.mark.slow

SET_UP = """
import sys; sys.path.insert(0, {here!r})
from multiprocessing import forkserver
began, begin = [], forkserver.ensure_running
forkserver.ensure_running = lambda: (began.append("torch" in sys.modules), begin())
from mgpu_tutorial.lab import launch
from tests.lab import ranks
"""


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """A manager and a client of a kernel, and what starts two ranks that sleep in it."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    with tempfile.TemporaryDirectory() as short:  # where only the kernel writes
        monkeypatch.setenv("TMPDIR", short)
        manager, client = start_new_kernel(kernel_name="python3")
        client.execute(SET_UP.format(here=str(Path(__file__).parents[3])), reply=True)

        def sleep():
            code = f"launch(ranks.sleeper, 2, marker={str(tmp_path / 'pid')!r})"
            client.execute(code, stop_on_error=False)  # else the kernel drops what comes next
            assert after(60, lambda: len(noted(tmp_path)) < 2) is False
            return noted(tmp_path)

        yield manager, client, sleep
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_a_cell_is_interrupted_the_next_one_runs_and_jupyter_asks_for_the_end(kernel):
    manager, client, sleep = kernel
    ranks = sleep()  # launch(ranks.sleeper, 2) in the kernel, which does not return
    manager.interrupt_kernel()
    reply = client.get_shell_msg(timeout=30)["content"]
    assert "\n".join(reply["traceback"]) == f"KeyboardInterrupt: {reply['evalue']}"
    assert "  rank 1 was at ranks.py:" in reply["evalue"]
    assert psutil.wait_procs(ranks, timeout=20)[1] == []
    asked = {"user_expressions": {"began": "began"}, "reply": True, "timeout": 60}
    reply = client.execute("launch(ranks.total, 2)", **asked)["content"]
    assert reply["status"] == "ok"
    # SET_UP has noted: the fork server began before the kernel imported torch.
    assert reply["user_expressions"]["began"]["data"]["text/plain"].startswith("[False")
    ranks, process = sleep(), psutil.Process(manager.provisioner.process.pid)
    manager.request_shutdown()
    process.wait(timeout=10)  # soon: ipykernel itself waits for 14 s
    assert psutil.wait_procs(ranks, timeout=20)[1] == []
    assert after(20, lambda: list(Path(os.environ["TMPDIR"]).iterdir())) == []
