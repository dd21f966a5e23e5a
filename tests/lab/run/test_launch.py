"""The launcher: what comes back, Ctrl-C, and nothing left behind."""

import gc
import multiprocessing
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial.lab import RankFailed, launch
from mgpu_tutorial.lab.run import files, server
from mgpu_tutorial.lab.run import ranks as running
from mgpu_tutorial.lab.run.rank import prepare
from tests.lab.ranks import launch_ten_in_three_threads, sleeper, total
from tests.lab.run.conftest import after, start

# What comes back


def talk(rank, world_size):
    time.sleep(0.1 * (world_size - rank))
    print(f"\rhalf\rout {rank}", flush=True)
    print(f"err {rank}", file=sys.stderr)
    os.system(f"echo shell {rank}")


def test_output_is_grouped_by_rank_whatever_the_order_of_printing():
    report = launch(talk, 3)
    assert report.stdout == [f"\rhalf\rout {r}\nshell {r}\n" for r in range(3)]
    assert report.stderr == [f"err {r}\n" for r in range(3)]
    assert report.seconds > 0.2  # until the slowest rank has ended
    lines = [f"rank {r} │ {what} {r}" for r in range(3) for what in ("out", "shell", "err")]
    assert [line for line in repr(report).splitlines() if "returned" not in line] == lines


@pytest.mark.parametrize("length", [3, 12_500_000])
def test_a_tensor_returns_whole_however_large(length):
    (result,) = launch(lambda *_: torch.arange(length), 1).results
    assert torch.equal(result, torch.arange(length)) and result.device.type == "cpu"


NAMES = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "LESSON"]


def settings(rank, world_size):
    drawn = torch.rand(1).item(), random.random(), np.random.rand()
    variables = [os.environ.get(name) for name in NAMES]
    imported = set(server.PRELOAD) <= set(sys.modules)
    return torch.get_num_threads(), dist.get_backend(), drawn, variables, imported


def test_a_rank_has_one_thread_the_seed_0_and_the_environment_of_this_moment(monkeypatch):
    monkeypatch.setenv("LESSON", "now")
    torch.manual_seed(0)
    drawn = torch.rand(1).item(), random.Random(0).random(), np.random.RandomState(0).rand()
    for rank, found in enumerate(launch(settings, 2, device="cpu").results):
        assert found == (1, "gloo", drawn, [str(rank)] * 2 + ["2", "2", "1", "now"], True)
    assert launch(total, 4).results == [6.0] * 4


def starts_another(rank, world_size):
    usual = multiprocessing.context._default_context
    usual._default_context = multiprocessing.get_context("forkserver")  # as from 3.14 on
    prepare("cpu")
    return multiprocessing.get_start_method()


def test_what_a_rank_starts_is_a_fork_whatever_is_usual():
    assert launch(starts_another, 1).results == ["fork"]


def what_it_is_told(rank, world_size):
    own = [os.environ[name] for name in NAMES[:-1]]
    return own, os.environ["GLOO_SOCKET_IFNAME"], tempfile.gettempdir()


def test_what_a_rank_is_told_comes_before_what_the_kernel_has(monkeypatch, tmp_path):
    for name in (*NAMES[:-1], "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for rank, found in enumerate(launch(what_it_is_told, 2, device="cpu").results):
        own, interface, folder = found
        assert own == [str(rank), str(rank), "2", "2", "1"] and interface == files.LOOPBACK
        assert Path(folder).name == files.TEMPORARY
        assert Path(folder).parent.name.startswith(files.LAUNCHES)


def test_what_a_rank_printed_is_read_up_to_a_limit_and_the_cut_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "OUTPUT_LIMIT", 10)
    for printed, read in ((b"0123456789", ""), (b"0123456789a", "\n… cut here\n")):
        (tmp_path / files.STDOUT).write_bytes(printed)
        assert files.text_of(tmp_path / files.STDOUT) == "0123456789" + read
    assert files.text_of(tmp_path / files.STDERR) == ""


def test_an_edited_worker_runs_at_the_next_launch(tmp_path, monkeypatch):
    file = tmp_path / "lesson.py"
    file.write_text("def worker(rank, world_size):\n    return 'before'\n")
    monkeypatch.syspath_prepend(tmp_path)
    import lesson

    assert launch(lesson.worker, 2).results == ["before"] * 2
    file.write_text("def worker(rank, world_size, more=1):\n    return 'the text after'\n")
    assert launch(lesson.worker, 2, more=2).results == ["the text after"] * 2


# Ctrl-C


@pytest.fixture
def ctrl_c():
    """A background job of a shell starts with SIGINT ignored: undo that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


MKDTEMP, RMTREE = (files.tempfile, "mkdtemp"), (files.shutil, "rmtree")
INIT, START, WATCH, STOP = (
    (running.Ranks, n) for n in ("__init__", "start", "watch", "stop")
)


@pytest.mark.parametrize(
    "before, after",
    [
        ([], [MKDTEMP]),
        ([], [START]),
        ([], [INIT]),
        ([WATCH, STOP], []),
        ([WATCH], [STOP]),
        ([WATCH, RMTREE], []),
    ],
    ids=["mkdtemp", "start", "init", "watch and stop", "watch, after stop", "rmtree"],
)
def test_ctrl_c_at_any_step_stops_the_ranks(monkeypatch, ctrl_c, before, after):
    """Pressed three times before or after these steps of a launch."""

    def pressing(step, begins, ends):  # `step` as launch calls it, Ctrl-C around it
        def call(*args, **kwargs):
            [ctrl_c() for _ in range(3 * begins)]
            result = step(*args, **kwargs)
            [ctrl_c() for _ in range(3 * ends)]
            return result

        return call

    for place in [*before, *after]:
        step = pressing(getattr(*place), place in before, place in after)
        monkeypatch.setattr(*place, step)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        launch(sleeper, 2)
    assert signal.getsignal(signal.SIGINT) is handler


# Nothing is left, nothing grows


def hold_the_interpreter(rank, world_size, marker):
    """Deep in C code, where no thread can look for the kernel; with a child of its own."""
    if rank == 1 and os.fork() == 0:
        time.sleep(300)
    Path(f"{marker}.{rank}").write_text(str(os.getpid()))
    re.match(r"(a+)+$", "a" * 60 + "b")


@pytest.mark.slow
def test_a_killed_kernel_takes_everything_with_it(tmp_path):
    program = """
        from mgpu_tutorial.lab import launch
        from tests.lab.run.test_launch import hold_the_interpreter
        if __name__ == "__main__":
            launch(hold_the_interpreter, 2, "pid")
    """
    kernel = start(program, tmp_path)
    assert after(100, lambda: len(list(tmp_path.glob("pid.*"))) < 2) is False
    family = psutil.Process(kernel.pid).children(recursive=True)
    assert len(family) >= 4  # the fork server, two ranks, the child of one
    kernel.kill()
    kernel.communicate(timeout=10)  # returns when nobody holds its pipes any more
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
def test_two_notebooks_launch_at_once_and_each_in_three_threads(tmp_path):
    program = """
        from mgpu_tutorial.lab import launch
        from tests.lab import ranks
        if __name__ == "__main__":
            launch(ranks.total, 2)
            ranks.note("./began", 0)
            print(ranks.launch_ten_in_three_threads())
    """
    other = start(program, tmp_path)
    assert after(60, lambda: not (tmp_path / "began").exists()) is False
    assert launch_ten_in_three_threads() == [[3.0] * 3] * 10
    out, err = other.communicate(timeout=100)
    assert out == f"{[[3.0] * 3] * 10}\n", err
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
def test_ten_launches_leave_nothing_behind():
    def state():
        gc.collect()  # exceptions of earlier tests still hold their launches
        me, written = psutil.Process(), files.kernel_folder().rglob("*")
        children = me.children(recursive=True)
        return me.num_fds(), threading.active_count(), len(children), len(list(written))

    launch(total, 2)
    before = state()
    for _ in range(5):
        launch(total, 2)
        with pytest.raises(RankFailed):
            launch(lambda rank, _: rank == 1 and os._exit(0), 2)
    assert state() == before


def waits(rank, world_size, timeout=1.0):
    return timeout


@pytest.mark.parametrize("option", [{"timeout": 5}, {"timeout": 5, "trace": True}])
def test_an_option_that_the_worker_has_too_is_refused(option):
    with pytest.raises(
        ValueError, match=r"launch takes timeout=5 .* parameter 'timeout' too"
    ):
        launch(waits, 2, **option)


def test_a_default_of_the_worker_with_an_options_name_stays_its_own(ranks):
    assert ranks(1, waits).results == [1.0] and ranks(1, waits, 2.0).results == [2.0]
