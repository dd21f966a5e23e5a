"""The launcher: results in order, every failure named, nothing left behind."""

import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from multiprocessing import util
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from mgpu_tutorial.lab import CannotTravel, RankFailed, RanksHung, launch
from mgpu_tutorial.lab.run import files, server
from mgpu_tutorial.lab.run import launch as launching
from mgpu_tutorial.lab.run import ranks as running
from tests.lab import programs, ranks
from tests.lab.leftovers import after, leftovers, runs

TIMEOUT, HANGS = 2.0, 1.0  # seconds; where a launch has to wait for them all
PROGRAM = """
from mgpu_tutorial.lab import launch
from tests.lab import ranks
launch(ranks.total, 2)
"""


@pytest.fixture(scope="module", autouse=True)
def warm():
    launch(ranks.total, 2)


@pytest.fixture(autouse=True)
def nothing_is_left(warm, tmp_path_factory, monkeypatch):
    temporary = tmp_path_factory.mktemp("tmp")  # other programs write to the usual one
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield
    assert after(5, leftovers) == []
    assert list(temporary.iterdir()) == []


@pytest.fixture
def ctrl_c():
    """A background job of a shell starts with SIGINT ignored: undo that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)


def fails(worker, world_size=3, kind=RankFailed, **options):
    """Launch, expect the failure long before the workers' sleep of 60 s; return its lines."""
    begin = time.monotonic()
    timeout = HANGS if kind is RanksHung else TIMEOUT
    with pytest.raises(kind) as caught:
        launch(worker, world_size, timeout=timeout, **options)
    assert time.monotonic() - begin < timeout + 20
    return str(caught.value).splitlines(), caught.value


def line_of(worker, text):
    import inspect

    lines, first = inspect.getsourcelines(worker)
    return first + next(i for i, line in enumerate(lines) if text in line)


# What comes back


def test_results_are_in_rank_order():
    assert launch(ranks.total, 4).results == [6.0] * 4
    assert len(set(launch(ranks.pid, 3).results) | {os.getpid()}) == 4


def test_output_is_grouped_by_rank_whatever_the_order_of_printing():
    report = launch(ranks.talk, 3)
    assert report.stdout == [f"out {r}\nshell {r}\n" for r in range(3)]
    assert report.stderr == [f"err {r}\n" for r in range(3)]
    lines = [f"rank {r} │ {what} {r}" for r in range(3) for what in ("out", "shell", "err")]
    assert [line for line in repr(report).splitlines() if "returned" not in line] == lines
    assert all(f"{what} 2" in report._repr_html_() for what in ("out", "shell", "err"))
    assert report._repr_html_() == launch(ranks.talk, 3)._repr_html_()


def test_ten_megabytes_from_each_rank_at_once():
    report = launch(ranks.chatter, 3, 10)
    for text in report.stdout:
        assert len(text.encode()) > 10 * 2**20 - 100
        assert set(text.splitlines()) == {"ünïcode " * 8}
    assert len(repr(report)) < 50_000 and "more lines in report.stdout[2]" in repr(report)


def test_a_tensor_of_50_megabytes_returns_whole():
    result = launch(ranks.big, 2).results
    assert result[0].shape == (12_500_000,) and result[0].sum() == 0 and result[1] is None


def test_silence_is_shown_as_silence():
    report = launch(ranks.silent, 2)
    assert report.stdout == ["", ""] and report.results == [None, None]
    assert repr(report) == "rank 0 │ (silent)\nrank 1 │ (silent)"


def test_a_rank_has_one_thread_a_seed_and_torchruns_environment():
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"]
    assert launch(ranks.environment, 2, *names).results == [
        ["0", "0", "2", "2"],
        ["1", "1", "2", "2"],
    ]
    (threads, first, backend), other = launch(ranks.settings, 2, device="cpu").results
    torch.manual_seed(0)
    drawn = torch.rand(1).item(), random.Random(0).random(), np.random.RandomState(0).rand()
    assert (threads, backend) == (1, "gloo") and first == other[1] == drawn


def test_ranks_see_the_environment_of_this_moment(monkeypatch):
    monkeypatch.setenv("LESSON", "now")
    assert launch(ranks.environment, 1, "LESSON").results == [["now"]]


def test_ranks_are_born_with_what_the_package_imports_slowly():
    names = [*server.PRELOAD, "torchvision", "torch._dynamo", "antigravity"]
    found = launch(ranks.has_imported, 1, *names).results[0]
    assert found == [name != "antigravity" for name in names]


# How workers and arguments travel


def test_arguments_that_cannot_travel_are_named():
    with pytest.raises(CannotTravel, match=r"argument 0 of two_arguments\['lock'\] \(lock\)"):
        launch(ranks.two_arguments, 2, {"size": 3, "lock": threading.Lock()})
    with pytest.raises(CannotTravel, match=r"argument data of two_arguments \(generator\)"):
        launch(ranks.two_arguments, 2, data=(i for i in range(3)))


def test_results_that_cannot_travel_are_named():
    lines, _ = fails(ranks.lock_result)
    assert lines[0].startswith("the result of rank 0['lock'] (lock) cannot be sent")


@pytest.mark.slow
def test_an_edited_worker_runs_at_the_next_launch(tmp_path):
    (tmp_path / "lesson.py").write_text(
        "def worker(rank, world_size):\n    return 'before'\n"
    )
    done = programs.run(
        """
        import pathlib, sys
        sys.path.insert(0, ".")
        sys.dont_write_bytecode = True
        import lesson
        from mgpu_tutorial.lab import launch
        print(launch(lesson.worker, 2).results)
        text = "def worker(rank, world_size, more=1):\\n    return 'the text after'\\n"
        pathlib.Path("lesson.py").write_text(text)
        print(launch(lesson.worker, 2, more=2).results)
    """,
        tmp_path,
    )
    assert done.stdout == "['before', 'before']\n['the text after', 'the text after']\n", (
        done.stderr
    )


# Failures


def test_an_exception_names_rank_line_and_the_fate_of_the_others():
    lines, error = fails(ranks.raises)
    place = f"ranks.py:{line_of(ranks.raises, 'raise ')}"
    assert lines[0] == (
        f"rank 1 raised ValueError: no such sample, at {place}  "
        'raise ValueError("no such sample")'
    )
    barrier = f"ranks.py:{line_of(ranks.raises, 'barrier')}  dist.barrier()"
    assert lines[1:] == [f"  rank 0 was at {barrier}", f"  rank 2 was at {barrier}"]
    shown = error._render_traceback_()  # broken at spaces for the page
    assert " ".join(shown).split() == f"RankFailed: {error}".split()
    assert max(map(len, shown)) <= 88
    assert "ValueError" in error.tracebacks[1]


def test_different_exceptions_are_all_named():
    lines, _ = fails(ranks.raise_differently)
    assert lines[0].startswith("rank 0 raised KeyError: 'weights', at ranks.py:")
    assert lines[1].startswith("rank 1 raised ZeroDivisionError: empty batch, at ranks.py:")
    assert lines[2].startswith("  rank 2 was at ranks.py:")


@pytest.mark.parametrize(
    "worker, says, mark",
    [
        (ranks.leaves, "rank 1 left with exit code 3, at ranks.py:", "os._exit(3)"),
        (ranks.exits, "rank 1 raised SystemExit: 3, at ranks.py:", "sys.exit(3)"),
        (ranks.killed, "rank 1 was killed by SIGKILL, at ranks.py:", "os.kill("),
        (ranks.segfault, "rank 1 was killed by SIGSEGV, at ranks.py:", "string_at(0)"),
    ],
)
def test_a_rank_that_dies_is_named_with_its_line(worker, says, mark):
    lines, _ = fails(worker)
    assert lines[0].startswith(f"{says}{line_of(worker, mark)}  ")
    assert mark in lines[0]
    waits = f"ranks.py:{line_of(worker, 'barrier')}  dist.barrier()"
    assert lines[1:] == [f"  rank 0 was at {waits}", f"  rank 2 was at {waits}"]


def test_a_receive_that_nobody_answers_is_shown_where_it_waits():
    lines, error = fails(ranks.unanswered, 2, RanksHung, trace=True)
    assert lines[0] == "2 of 2 ranks had not returned after 1 s"
    assert lines[1] == (
        f"  rank 0 was at ranks.py:{line_of(ranks.unanswered, 'dist.recv')}"
        "  dist.recv(torch.zeros(1), src=1)"
    )
    assert lines[3] == "  rank 0 waits in recv for rank 1"
    assert error.report.stdout[0] == "waiting\n"
    assert [event.op for event in error.report.events] == ["recv"]


def test_a_deadlock_names_the_circle():
    lines, _ = fails(ranks.both_send, 2, RanksHung, trace=True)
    assert lines[-2] == "  deadlock: 0 → 1 → 0"
    assert lines[-1].startswith(
        "  in a real job, after 30 minutes: RuntimeError: Timed out waiting 1800000ms for se"
    )


def test_a_rank_that_never_calls_anything_is_shown_too():
    lines, _ = fails(ranks.stops_being_heard, 1, RanksHung)
    assert lines[1].startswith("  rank 0 was at ranks.py:")


def test_a_rank_that_returns_early_is_blamed():
    lines, _ = fails(ranks.early)
    assert lines[0] == "rank 1 returned while ranks 0 and 2 still waited for an answer"
    barrier = f"ranks.py:{line_of(ranks.early, 'barrier')}  dist.barrier()"
    assert lines[1:] == [
        f"  rank 0 was at {barrier}",
        "  rank 1 had returned",
        f"  rank 2 was at {barrier}",
    ]


@pytest.mark.parametrize(
    "size, kind",
    [
        (0, ValueError),
        (-1, ValueError),
        ("2", TypeError),
        (65, ValueError),
        (True, TypeError),
        (2.0, TypeError),
    ],
)
def test_a_world_size_that_cannot_be_is_refused(size, kind):
    with pytest.raises(kind, match="world_size must be") as caught:
        launch(ranks.total, size)
    assert str(size) in str(caught.value)


def test_there_may_be_64_ranks():
    assert launching._whole_number(64) == 64


def test_a_launch_takes_the_time_of_its_slowest_worker():
    begin = time.monotonic()
    seconds = launch(ranks.ends_after, 2, 0.3).seconds
    assert 0.25 <= seconds < time.monotonic() - begin  # they do not begin at once


@pytest.mark.parametrize("timeout", [0, -1, "3", None, float("inf"), float("nan")])
def test_a_timeout_that_cannot_be_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
        launch(ranks.total, 2, timeout=timeout)


def test_a_worker_that_was_called_by_mistake_is_explained():
    with pytest.raises(TypeError, match=r"Write launch\(worker, 2\)"):
        launch(None, 2)


def test_a_wrong_signature_shows_the_signature():
    lines, _ = fails(ranks.two_arguments)
    assert lines[0] == (
        "two_arguments(rank, world_size, data) cannot be called as "
        "worker(rank, world_size): missing a required argument: 'data'"
    )
    lines, _ = fails(ranks.total, batch=3)
    assert "got an unexpected keyword argument 'batch'" in lines[0]


@pytest.mark.parametrize("device", ["gpu", "cuda", "cuda:x", "cuda:99", ""])
def test_a_device_that_is_not_there_is_refused(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="device"):
        launch(ranks.total, 2, device=device)


def test_a_launch_inside_a_rank_is_refused():
    lines, _ = fails(ranks.nested, 2)
    assert "launch() was called inside rank 0: a rank cannot start ranks" in lines[0]


@pytest.mark.slow
def test_a_program_on_standard_input_is_refused(tmp_path):
    done = subprocess.run(
        [sys.executable, "-"],
        input=PROGRAM,
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"PYTHONPATH": str(programs.ROOT)},
        cwd=tmp_path,
    )
    assert "program read from standard input" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_program_that_launches_when_it_is_imported_is_explained(tmp_path):
    _, said = programs.start(PROGRAM, tmp_path).communicate(timeout=60)
    assert 'Put the call under if __name__ == "__main__":' in said.splitlines()[-1]


# Interruptions


def press_when(condition, press):
    """Press Ctrl-C from another thread as soon as `condition` holds."""

    def wait():
        while not condition():
            time.sleep(0.001)
        press()

    threading.Thread(target=wait).start()


def test_ctrl_c_stops_the_ranks_and_stays_a_keyboard_interrupt(tmp_path, ctrl_c):
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        press_when(lambda: len(list(tmp_path.glob("pid.*"))) == 3, ctrl_c)
        launch(ranks.sleeper, 3, marker=str(tmp_path / "pid"))
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("delay", [0.005, 0.03, 0.06, 0.1])
def test_ctrl_c_while_the_ranks_start(delay, ctrl_c):
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        press_when(lambda: time.monotonic() > begin + delay, ctrl_c)
        launch(ranks.sleeper, 4)


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
    ids=str,
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
        launch(ranks.sleeper, 2)


def test_a_handler_of_ones_own_may_let_the_launch_go_on(monkeypatch, ctrl_c):
    came = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    step = running.Ranks.watch
    monkeypatch.setattr(running.Ranks, "watch", lambda *args: [ctrl_c(), step(*args)][1])
    assert launch(ranks.total, 2).results == [1.0, 1.0]
    assert came == [signal.SIGINT]


@pytest.mark.slow
def test_a_long_temporary_folder_is_no_obstacle(tmp_path):
    long = tmp_path / ("x" * 90)
    long.mkdir()
    code = """
        from mgpu_tutorial.lab import launch
        from tests.lab import ranks
        print(launch(ranks.total, 2).results)
    """
    done = programs.run(code, tmp_path, TMPDIR=str(long))
    assert done.stdout == "[1.0, 1.0]\n", done.stderr
    assert list(long.iterdir()) == []


def test_children_of_a_rank_end_with_it(tmp_path):
    fails(ranks.with_children, 2, RanksHung, marker=str(tmp_path / "child"))
    children = [int(path.read_text()) for path in tmp_path.glob("child.*")]
    assert len(children) == 2
    assert after(20, lambda: [child for child in children if runs(child)]) == []


SLEEPERS = """
from tests.lab import ranks
from mgpu_tutorial.lab import launch
if __name__ == "__main__":
    launch(ranks.sleeper, 3, marker="pid")
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("kill", [os.kill, os.killpg], ids=["kernel", "its group"])
def test_a_killed_kernel_takes_everything_with_it(tmp_path, kill, number):
    kernel = programs.start(SLEEPERS, tmp_path, start_new_session=True)
    assert after(60, lambda: [1] * (len(list(tmp_path.glob("pid.*"))) < 3)) == []
    family = psutil.Process(kernel.pid).children(recursive=True)
    assert len(family) >= 4  # the fork server and three ranks
    kill(kernel.pid, number)
    kernel.communicate(timeout=10)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert alive == []
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
def test_two_notebooks_launch_at_once(tmp_path):
    code = """
        from tests.lab import ranks
        from mgpu_tutorial.lab import launch
        if __name__ == "__main__":
            print([launch(ranks.total, 3).results for _ in range(10)])
    """
    kernels = [programs.start(code, tmp_path) for _ in range(2)]
    for kernel in kernels:
        assert kernel.communicate(timeout=100)[0] == f"{[[3.0] * 3] * 10}\n"


def test_threads_of_one_program_may_launch_at_once():
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(launch(ranks.total, 2).results))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [[1.0, 1.0]] * 3


# Nothing grows


def test_ten_launches_leave_nothing_behind():
    me = psutil.Process()

    def state():
        gc.collect()  # exceptions of earlier tests still hold their launches
        files = len(list(Path(util.get_temp_dir()).rglob("*")))
        return (
            me.num_fds(),
            threading.active_count(),
            len(me.children(recursive=True)),
            files,
        )

    launch(ranks.total, 2)
    before = state()
    for _ in range(10):
        launch(ranks.total, 2)
    assert state() == before


def test_ranks_listen_on_loopback_only():
    addresses = [
        ip for found in launch(ranks.listeners, 3, device="cpu").results for ip in found
    ]
    assert addresses and set(addresses) <= {"127.0.0.1", "::1"}


def test_progress_counts_in_a_rank_and_outside():
    assert launch(ranks.counts, 2).results == [1225, 1225]
    assert ranks.counts(0, 1) == 1225


def test_workers_return_plain_tensors():
    (result,) = launch(ranks.two_arguments, 1, torch.arange(3)).results
    assert torch.equal(result, torch.arange(3)) and result.device.type == "cpu"
