"""The launcher: what comes back, Ctrl-C, and nothing left behind."""

import gc
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial.lab import launch, progress
from mgpu_tutorial.lab.run import files, server
from mgpu_tutorial.lab.run import ranks as running
from tests.lab.ranks import sleeper, total
from tests.lab.run import programs
from tests.lab.run.conftest import after

# What comes back


def identity(rank, world_size, value):
    return value


def talk(rank, world_size):
    time.sleep(0.05 * (world_size - rank))
    print(f"\rhalf\rout {rank}", flush=True)
    print(f"err {rank}", file=sys.stderr)
    os.system(f"echo shell {rank}")


def test_output_is_grouped_by_rank_whatever_the_order_of_printing():
    report = launch(talk, 3)
    assert report.stdout == [f"\rhalf\rout {r}\nshell {r}\n" for r in range(3)]
    assert report.stderr == [f"err {r}\n" for r in range(3)]
    lines = [f"rank {r} │ {what} {r}" for r in range(3) for what in ("out", "shell", "err")]
    assert [line for line in repr(report).splitlines() if "returned" not in line] == lines
    assert all(f"{what} 2" in report._repr_html_() for what in ("out", "shell", "err"))
    assert repr(launch(identity, 2, None)) == "rank 0 │ (silent)\nrank 1 │ (silent)"


def chatter(rank, world_size):
    for _ in range(10 * 2**20 // 80):
        print("ünïcode " * 8)


def test_ten_megabytes_from_each_rank_at_once():
    report = launch(chatter, 3)
    for text in report.stdout:
        assert text == f"{'ünïcode ' * 8}\n" * (10 * 2**20 // 80)
    assert len(repr(report)) < 50_000 and "more lines in report.stdout[2]" in repr(report)


@pytest.mark.parametrize("value", [torch.arange(3), torch.ones(12_500_000)], ids=len)
def test_a_tensor_returns_whole_however_large(value):
    (result,) = launch(identity, 1, value).results
    assert torch.equal(result, value) and result.device.type == "cpu"


def settings(rank, world_size, *names):
    drawn = torch.rand(1).item(), random.random(), np.random.rand()
    variables = [os.environ.get(name) for name in names]
    return torch.get_num_threads(), dist.get_backend(), drawn, variables, os.getpid()


def test_a_rank_has_one_thread_the_seed_0_and_the_environment_of_this_moment(monkeypatch):
    monkeypatch.setenv("LESSON", "now")
    monkeypatch.setenv("MGPU_RANK_FOLDER", "of a launch that is over")
    names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "OMP_NUM_THREADS",
        "LESSON",
    ]
    results = launch(settings, 2, *names, device="cpu").results
    torch.manual_seed(0)
    drawn = torch.rand(1).item(), random.Random(0).random(), np.random.RandomState(0).rand()
    for rank, (*given, pid) in enumerate(results):
        assert given == [1, "gloo", drawn, [str(rank)] * 2 + ["2", "2", "1", "now"]]
        assert pid != os.getpid()
    assert launch(total, 4).results == [6.0] * 4


def has_imported(rank, world_size, *modules):
    return [module in sys.modules for module in modules]


def test_ranks_are_born_with_what_the_package_imports_slowly():
    names = [*server.PRELOAD, "torchvision", "torch._dynamo", "antigravity"]
    found = launch(has_imported, 1, *names).results[0]
    assert found == [name != "antigravity" for name in names]


def ends_after(rank, world_size, seconds):
    time.sleep(seconds * rank)


def test_a_launch_takes_the_time_of_its_slowest_worker():
    begin = time.monotonic()
    seconds = launch(ends_after, 2, 0.7).seconds  # longer than a rank waits for others
    assert 0.65 <= seconds < time.monotonic() - begin  # they do not begin at once


def count(rank, world_size):
    before = len(os.listdir("/proc/self/fd"))
    for _ in progress(range(3)):
        break  # leaves no descriptor
    return sum(progress(range(50))), len(os.listdir("/proc/self/fd")) - before


def test_progress_counts_in_a_rank_and_outside():
    assert launch(count, 2).results == [(1225, 0)] * 2
    assert count(0, 1)[0] == 1225


@pytest.mark.slow
def test_an_edited_worker_runs_at_the_next_launch(tmp_path):
    """Also where TMPDIR is too long for a socket."""
    (tmp_path / "lesson.py").write_text(
        "def worker(rank, world_size):\n    return 'before'\n"
    )
    program = """
        import pathlib, sys
        sys.dont_write_bytecode = True
        import lesson
        from mgpu_tutorial.lab import launch
        if __name__ == "__main__":
            print(launch(lesson.worker, 2).results)
            text = "def worker(rank, world_size, more=1):\\n    return 'the text after'\\n"
            pathlib.Path("lesson.py").write_text(text)
            print(launch(lesson.worker, 2, more=2).results)
    """
    out, err = programs.start(program, tmp_path, temporary="x" * 90).communicate(timeout=100)
    assert out == "['before', 'before']\n['the text after', 'the text after']\n", err
    assert list((tmp_path / ("x" * 90)).iterdir()) == []


@pytest.mark.slow
def test_under_torchrun_the_environment_decides_on_threads(tmp_path):
    program = """
        import os
        os.environ |= dict(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
        os.environ |= dict(MASTER_ADDR="127.0.0.1", OMP_NUM_THREADS="2")
        import torch
        from mgpu_tutorial.processes_and_ranks.meeting import free_port
        from mgpu_tutorial.lab.run.rank import under_torchrun
        os.environ["MASTER_PORT"] = str(free_port())
        under_torchrun(lambda rank, world_size: torch.get_num_threads(), {})
    """
    out, err = programs.start(program, tmp_path).communicate(timeout=100)
    assert out == "[rank 0] returned 2\n", err


# Ctrl-C


@pytest.fixture
def ctrl_c():
    """A background job of a shell starts with SIGINT ignored: undo that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_stops_the_ranks_and_stays_a_keyboard_interrupt(tmp_path, ctrl_c):
    def press():
        after(60, lambda: len(list(tmp_path.glob("pid.*"))) < 3)
        ctrl_c()

    threading.Thread(target=press).start()
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=r"rank 2 was at ranks\.py:"):
        launch(sleeper, 3, marker=str(tmp_path / "pid"))
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("delay", [0.005, 0.03, 0.1])
def test_ctrl_c_while_the_ranks_start(delay, ctrl_c):
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(delay, ctrl_c).start()
        launch(sleeper, 4)


STEPS = {  # of a launch, before or after which Ctrl-C is pressed three times
    "mkdtemp": files.tempfile,
    "start": running.Ranks,
    "rmtree": files.shutil,
    "__init__": running.Ranks,
    "watch": running.Ranks,
    "stop": running.Ranks,
}


@pytest.mark.parametrize(
    "before, after",
    [
        ([], ["mkdtemp"]),
        ([], ["start"]),
        ([], ["__init__"]),
        (["watch", "stop"], []),
        (["watch"], ["stop"]),
        (["watch", "rmtree"], []),
    ],
)
def test_ctrl_c_at_any_step_stops_the_ranks(monkeypatch, ctrl_c, before, after):
    def pressing(name, step):
        def call(*args, **kwargs):
            for _ in range(3 * (name in before)):
                ctrl_c()
            result = step(*args, **kwargs)
            for _ in range(3 * (name in after)):
                ctrl_c()
            return result

        return call

    for name in [*before, *after]:
        step = getattr(STEPS[name], name)
        monkeypatch.setattr(STEPS[name], name, pressing(name, step))
    with pytest.raises(KeyboardInterrupt):
        launch(sleeper, 2)


def test_a_handler_of_ones_own_may_let_the_launch_go_on(monkeypatch, ctrl_c):
    came = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    step = running.Ranks.watch
    monkeypatch.setattr(running.Ranks, "watch", lambda *args: [ctrl_c(), step(*args)][1])
    assert launch(total, 2).results == [1.0, 1.0]
    assert came == [signal.SIGINT]


# Nothing is left, nothing grows


def hold_the_interpreter(rank, world_size, marker):
    """Deep in C code, where no thread can look for the kernel; with a child of its own."""
    import re

    if rank == 1 and os.fork() == 0:
        time.sleep(60)
    Path(f"{marker}.{rank}").write_text(str(os.getpid()))
    re.match(r"(a+)+$", "a" * 60 + "b")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["kernel", "its group"])
def test_a_killed_kernel_takes_everything_with_it(tmp_path, kill, number):
    program = """
        from mgpu_tutorial.lab import launch
        from tests.lab.run.test_launch import hold_the_interpreter
        if __name__ == "__main__":
            launch(hold_the_interpreter, 2, "pid")
    """
    kernel = programs.start(program, tmp_path, start_new_session=True)
    assert after(60, lambda: len(list(tmp_path.glob("pid.*"))) < 2) is False
    family = psutil.Process(kernel.pid).children(recursive=True)
    assert len(family) >= 4  # the fork server, two ranks, the child of one
    kill(kernel.pid, number)
    kernel.communicate(timeout=10)  # returns when nobody holds its pipes any more
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
def test_two_notebooks_launch_at_once(tmp_path):
    program = """
        from mgpu_tutorial.lab import launch
        from tests.lab.ranks import total
        if __name__ == "__main__":
            print([launch(total, 3).results for _ in range(10)])
    """
    kernels = [programs.start(program, tmp_path) for _ in range(2)]
    for kernel in kernels:
        assert kernel.communicate(timeout=100)[0] == f"{[[3.0] * 3] * 10}\n"


def test_threads_of_one_program_may_launch_at_once():
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(launch(total, 2).results))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[1.0, 1.0]] * 3


def test_ten_launches_leave_nothing_behind():
    def state():
        gc.collect()  # exceptions of earlier tests still hold their launches
        me, written = psutil.Process(), files.kernel_folder().rglob("*")
        children = me.children(recursive=True)
        return me.num_fds(), threading.active_count(), len(children), len(list(written))

    launch(total, 2)
    before = state()
    for _ in range(10):
        launch(total, 2)
    assert state() == before
