"""What goes wrong in real programs: every fault is named, in time, and leaves nothing.

Each test is one way in which a launch was once seen to hang, to leave something behind or
to say what was not so.
"""

import builtins
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from functools import partial
from multiprocessing import get_context, synchronize, util
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from mgpu_tutorial.lab import CannotTravel, RankFailed, RanksHung, launch
from mgpu_tutorial.lab.record import source_lines, trace
from mgpu_tutorial.lab.run import errors, files, server, transfer
from mgpu_tutorial.lab.run import ranks as running
from tests.lab import faulty, programs
from tests.lab.leftovers import after, leftovers, runs

TIMEOUT = 2.0


@pytest.fixture(scope="module", autouse=True)
def warm():
    launch(faulty.total, 2)


@pytest.fixture(autouse=True)
def nothing_is_left_and_the_next_launch_works(warm, tmp_path_factory, monkeypatch):
    temporary = tmp_path_factory.mktemp("tmp")  # other programs write to the usual one
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    yield
    assert after(5, leftovers) == []
    assert list(temporary.iterdir()) == []
    monkeypatch.undo()
    assert launch(faulty.total, 2).results == [1.0, 1.0]


def load_factor():
    """How many processes want each core: a promise of seconds is for a core of one's own."""
    return max(1.0, os.getloadavg()[0] / os.cpu_count())


def fails(worker, world_size, *args, kind=RankFailed, **options):
    """Launch, expect the failure within the timeout plus three seconds."""
    begin = time.monotonic()
    with pytest.raises(kind) as caught:
        launch(worker, world_size, *args, **{"timeout": TIMEOUT} | options)
    assert time.monotonic() - begin < options.get("timeout", TIMEOUT) + 3 * load_factor()
    return str(caught.value).splitlines(), caught.value


def alive(folder: Path) -> list[str]:
    """The processes that wrote their number into a file of this folder and still run."""
    pids = [int(path.read_text()) for path in folder.glob("pid.*")]
    return [str(pid) for pid in pids if psutil.pid_exists(pid) and runs(psutil.Process(pid))]


# A rank that cannot end, a server that has ended


def test_ranks_that_cannot_exit_are_ended_and_their_results_kept(tmp_path):
    begin = time.monotonic()
    report = launch(faulty.never_exits, 4, str(tmp_path / "pid"), timeout=TIMEOUT)
    assert time.monotonic() - begin < running.EXIT_LIMIT + 3 * load_factor()
    assert report.results == [0, 1, 2, 3]
    for text in report.stderr:
        assert "launch ended this process 2 s after its worker had returned: " in text
    assert "the watcher was still at work" in report.stderr[0]
    assert len(list(tmp_path.iterdir())) == 1 and after(1, partial(alive, tmp_path)) == []


def test_a_thread_may_finish_its_file_after_the_worker(tmp_path):
    launch(faulty.writes_in_a_thread, 2, str(tmp_path / "checkpoint"), timeout=20)
    assert (tmp_path / "checkpoint").read_text() == "all of it"


def test_a_thread_that_lasts_does_not_hold_the_connections():
    lines, _ = fails(faulty.leaves_a_thread, 2, timeout=20)
    assert lines[0] == "rank 0 returned while rank 1 still waited for an answer"


@pytest.mark.slow
def test_a_server_that_tells_of_no_end_is_replaced(monkeypatch):
    monkeypatch.setattr(running, "SILENT_LIMIT", 0.5)
    monkeypatch.setattr(running, "KILL_LIMIT", 0.5)
    report = launch(faulty.freezes_the_server, 2)
    assert report.results == [0, 1]
    assert report.stderr == ["", ""]


def test_a_child_that_returns_from_the_worker_is_not_the_rank():
    assert launch(faulty.forks_and_returns, 2).results == [None, None]


@pytest.mark.slow
def test_a_fork_server_that_dies_by_itself_leaves_the_folder_of_the_kernel():
    pid = server.borrowed.fork_server_pid()
    folder = files.kernel_folder()
    marker = folder / "of the kernel"
    marker.touch()
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, 3))
    with pytest.raises(
        RankFailed, match="rank 0 could not be started: .*Too many open files"
    ):
        launch(faulty.total, 2)
    assert after(5, lambda: [pid] if psutil.pid_exists(pid) else []) == []
    assert marker.exists()
    marker.unlink()


@pytest.mark.slow
def test_a_kernel_with_too_few_descriptors_says_so():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    fillers = [os.open(os.devnull, os.O_RDONLY)]
    while fillers[-1] < used:
        fillers.append(os.dup(fillers[0]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (fillers[-1] + 9, hard))
    try:
        with pytest.raises(RankFailed, match=r"rank \d could not be started: .*Too many"):
            launch(faulty.total, 8)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in fillers:
            os.close(descriptor)


@pytest.mark.slow
def test_a_temporary_folder_that_was_removed_is_made_again():
    import shutil

    shutil.rmtree(util.get_temp_dir())
    assert launch(faulty.total, 2).results == [1.0, 1.0]
    assert Path(util.get_temp_dir()).stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_a_fork_server_that_is_killed_during_a_launch_is_named(tmp_path):
    def kill():
        after(10, lambda: [] if len(list(tmp_path.glob("pid.*"))) == 2 else [1])
        time.sleep(0.3)  # until both have left a note of where they are
        os.kill(server.borrowed.fork_server_pid(), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    lines, _ = fails(faulty.says_who_it_is, 2, str(tmp_path / "pid"), timeout=20)
    thread.join()
    assert lines[0].startswith("ranks 0 and 1 left with exit code 255, at faulty.py:")
    assert lines[1].strip() == (
        "their last words: the fork server, from which all ranks come, was killed"
    )
    os.waitpid(server.borrowed.fork_server_pid(), 0)  # as a program may that waits for all


@pytest.mark.slow
def test_programs_of_ranks_end_when_the_fork_server_is_killed(tmp_path):
    def kill():
        after(10, lambda: [] if len(list(tmp_path.glob("pid.*"))) == 2 else [1])
        os.kill(server.borrowed.fork_server_pid(), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with pytest.raises(RankFailed):
        launch(faulty.waits_for_a_program, 2, str(tmp_path / "pid"))
    thread.join()
    assert len(list(tmp_path.iterdir())) == 2
    assert after(5, partial(alive, tmp_path)) == []


@pytest.mark.slow
def test_a_frozen_fork_server_is_replaced(monkeypatch):
    monkeypatch.setattr(running, "JOIN_LIMIT", 3.0)
    os.kill(server.borrowed.fork_server_pid(), signal.SIGSTOP)
    with pytest.raises(
        RankFailed, match="rank 0 could not be started: the fork server .* did not answer"
    ):
        launch(faulty.total, 2)


def test_a_child_of_a_program_has_a_folder_of_its_own():
    context = get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=lambda: queue.put(str(files.kernel_folder())))
    child.start()
    folder = queue.get()
    child.join()
    assert folder == str(Path(util.get_temp_dir(), f"child-{child.pid}"))
    os.rmdir(folder)


def test_a_launch_in_a_forked_child_is_refused():
    context = get_context("fork")
    queue = context.SimpleQueue()

    def child():
        try:
            launch(faulty.total, 1)
        except RuntimeError as error:
            queue.put(str(error))

    process = context.Process(target=child)
    process.start()
    process.join()
    assert "forked from one that had launched ranks" in queue.get()


@pytest.mark.slow
def test_the_fork_server_says_why_it_cannot_start(tmp_path):
    done = programs.start(
        """
        import pathlib
        from mgpu_tutorial.lab import launch
        from tests.lab import faulty, programs
        torn = pathlib.Path("queue.py")
        if __name__ == "__main__":
            torn.write_text("this is no Python")
            try:
                launch(faulty.total, 2)
            except RuntimeError as error:
                print(error)
            torn.unlink()
            print(launch(faulty.total, 2).results)
        """,
        tmp_path,
    )
    out, err = done.communicate(timeout=100)
    first, *_, last = out.splitlines()
    assert first.startswith("the fork server could not be started: SyntaxError"), err
    assert first.endswith("queue.py, line 1)")
    assert last == "[1.0, 1.0]"
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("launch_too", [False, True])
def test_a_folder_that_is_removed_during_a_launch_is_named(launch_too):
    lines, _ = fails(faulty.removes_its_folder, 2, launch_too, timeout=20)
    who = "ranks 0 and 1 were" if launch_too else "rank 0 was"
    assert lines[0] == f"{who} killed by SIGKILL, at an unknown line"
    assert re.search(
        r"last words: somebody has removed .*/launch-\w+/rank0, a fold", lines[1]
    )


def test_a_rank_that_dies_at_once_is_named_with_its_worker():
    lines, _ = fails(faulty.dies_at_once, 1)
    assert lines[0].startswith("rank 0 was killed by SIGKILL, at faulty.py:")
    assert "def dies_at_once(rank, world_size):" in lines[0]


def test_a_failure_just_before_the_time_is_up_is_no_hang():
    lines, _ = fails(faulty.raises_late, 2, 0.8, timeout=1.0)
    assert lines[0].startswith("rank 0 raised ValueError: too late for the others")
    assert lines[1].startswith("  rank 1 was at faulty.py:")


def test_a_variable_that_is_left_over_makes_no_rank_of_a_kernel(monkeypatch, tmp_path):
    monkeypatch.setenv("MGPU_RANK_FOLDER", str(tmp_path / "of a launch that is over"))
    assert launch(faulty.total, 2).results == [1.0, 1.0]


# What outlives a launch or a kernel


@pytest.mark.slow
def test_a_killed_kernel_takes_ranks_with_it_that_cannot_look_for_it(tmp_path):
    kernel = programs.start(
        """
        import sys
        from mgpu_tutorial.lab import launch
        from tests.lab import faulty, programs
        if __name__ == "__main__":
            launch(faulty.holds_the_interpreter, 2, sys.argv[1])
        """,
        tmp_path,
        str(tmp_path / "pid"),
    )
    end = time.monotonic() + 60
    while len(list(tmp_path.glob("pid.*"))) < 3 - 1 and time.monotonic() < end:
        time.sleep(0.02)
    time.sleep(0.2)
    family = psutil.Process(kernel.pid).children(recursive=True)
    assert len([p for p in family if runs(p)]) >= 4  # server, ranks, the child of one
    kernel.kill()
    kernel.communicate(timeout=10)  # returns when nobody holds its pipes any more
    assert after(5, lambda: [str(p) for p in family if runs(p)]) == []
    assert after(5, lambda: list((tmp_path / "tmp").iterdir())) == []


@pytest.mark.slow
def test_a_kernel_that_is_shut_down_during_a_launch_does_not_wait_for_it(tmp_path):
    done = programs.start(
        """
        import os, pathlib, sys, threading, time, types
        from mgpu_tutorial.lab import launch
        from mgpu_tutorial.lab.run import server
        from tests.lab import faulty, programs

        def shut_down():
            while len(list(pathlib.Path().glob("pid.*"))) < 2:
                time.sleep(0.02)
            kernel.do_shutdown(False)

        if __name__ == "__main__":
            kernel = types.SimpleNamespace(do_shutdown=lambda restart: os._exit(7))
            server.end_with(kernel)
            threading.Thread(target=shut_down, daemon=True).start()
            try:
                launch(faulty.says_who_it_is, 2, sys.argv[1], timeout=20)
            except RuntimeError as error:
                print(type(error).__name__, flush=True)
                time.sleep(60)
        """,
        tmp_path,
        "pid",
    )
    out, err = done.communicate(timeout=100)
    assert done.returncode == 7, err
    assert "RanksHung" not in out
    assert after(5, partial(alive, tmp_path)) == []
    assert after(5, lambda: list((tmp_path / "tmp").iterdir())) == []


def test_the_launcher_makes_no_semaphore(monkeypatch):
    def refuse(*_):
        raise AssertionError("a semaphore stays when a kernel is killed")

    monkeypatch.setattr(synchronize.SemLock, "__init__", refuse)
    assert launch(faulty.total, 2).results == [1.0, 1.0]


def test_a_program_that_a_rank_started_ends_with_the_launch(tmp_path):
    launch(faulty.leaves_a_program, 2, str(tmp_path / "pid"))
    assert len(list(tmp_path.iterdir())) == 2
    assert after(1, partial(alive, tmp_path)) == []


@pytest.mark.parametrize("times, gap", [(5, 0.005), (2, 0.15)])
def test_a_burst_of_ctrl_c_leaves_no_rank(times, gap):
    def press():
        after(60, lambda: [] if list(files.kernel_folder().glob("launch-*")) else [1])
        time.sleep(0.3)
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(gap)

    def interrupt(number, frame):  # outside of launch it would end the tests
        if frame is None:  # launch obeys one that had to wait
            raise KeyboardInterrupt
        while frame is not None:
            if frame.f_code is launch.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back

    before = signal.signal(signal.SIGINT, interrupt)
    thread = threading.Thread(target=press)
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            launch(faulty.sleeps, 3)
    finally:
        thread.join()
        signal.signal(signal.SIGINT, before)


def test_temporary_files_of_ranks_go_with_the_launch():
    fails(faulty.dies_with_temporary_files, 2)
    first, second = launch(faulty.folder_for_temporary_files, 2).results
    assert first == second and not Path(first).exists()


# Messages


def in_a_cell(source: str, name: str):
    """A function as a notebook cell defines it: its module is __main__, it has no file."""
    space = {"__name__": "__main__", "__builtins__": builtins}
    exec(textwrap.dedent(source), space)
    return space[name]


def test_a_recursive_function_with_an_unpicklable_global_is_named():
    worker = in_a_cell(
        """
        import threading
        lock = threading.Lock()
        def again(rank, world_size):
            return lock if rank else again(rank - 1, world_size)
        """,
        "again",
    )
    with pytest.raises(CannotTravel, match=r"lock, which the worker again uses, \(lock\)"):
        launch(worker, 2)


def test_a_name_without_a_value_does_not_hide_what_cannot_travel():
    worker = in_a_cell(
        """
        import threading
        lock = threading.Lock()
        def make():
            def worker(rank, world_size):
                return later, lock
            return worker
            later = 1
        worker = make()
        """,
        "worker",
    )
    with pytest.raises(CannotTravel, match=r"lock, which the worker worker uses, \(lock\)"):
        launch(worker, 2)


def test_what_a_cell_uses_travels_with_its_worker():
    worker = in_a_cell(
        """
        import functools
        FACTOR = 10
        @functools.cache
        def fibonacci(n):
            return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
        def worker(rank, world_size, *, shift):
            return FACTOR * rank + shift(rank) + fibonacci(20)
        """,
        "worker",
    )
    assert launch(worker, 2, shift=lambda rank: rank + 1).results == [6766, 6777]


def test_an_error_of_ones_own_that_sounds_like_a_lost_peer_is_a_cause():
    lines, _ = fails(faulty.refuses, 3, (0, 1, 2))
    said = "raised RuntimeError: Connection refused by the data base, at faulty.py:"
    assert lines[0].startswith(f"ranks 0, 1 and 2 {said}") and len(lines) == 1
    lines, _ = fails(faulty.refuses, 3, (1,))
    assert lines[0].startswith(f"rank 1 {said}")
    assert lines[1:] == ["  rank 0 had returned", "  rank 2 had returned"]


def test_a_store_that_nobody_serves_is_a_cause():
    lines, _ = fails(faulty.meets_nobody, 2, backend="none")
    assert lines[0].startswith("rank 1 raised DistNetworkError: The client socket has timed")
    assert lines[1] == "  rank 0 had returned"


@pytest.mark.parametrize("who, ranks", [((0, 1), "ranks 0 and 1"), ((1,), "rank 1")])
def test_a_rank_that_leaves_without_a_word_is_a_cause(who, ranks):
    lines, _ = fails(faulty.leaves_quietly, 2, who)
    assert lines[0].startswith(f"{ranks} left with exit code 0, at faulty.py:")


def test_an_exit_code_may_come_by_its_name():
    lines, _ = fails(faulty.leaves_by_name, 1)
    assert lines[0].startswith("rank 0 left with exit code 3, at faulty.py:")


def test_a_culprit_that_hangs_up_first_is_waited_for():
    lines, _ = fails(faulty.hangs_up_first, 2, timeout=20)
    assert lines[0].startswith("rank 1 raised ValueError: the reason, at faulty.py:")


def test_a_rank_that_computes_does_not_wait_for_an_answer():
    outcomes = [
        errors.RankOutcome(0, "returned"),
        errors.RankOutcome(1, "raised", lost_peer=True),
        errors.RankOutcome(2, "stopped", waits_in="recv"),
        errors.RankOutcome(3, "stopped"),
    ]
    said = str(errors.failure(outcomes, errors.Report(world_size=4))).splitlines()
    assert said[0] == "rank 0 returned while ranks 1 and 2 still waited for an answer"


def test_several_ranks_were_killed():
    worker = partial(faulty.ends_by_number, number=signal.SIGKILL)
    lines, _ = fails(worker, 1)
    assert lines[0].startswith("rank 0 was killed by SIGKILL, at faulty.py:")
    outcome = errors.RankOutcome(0, "died", exitcode=-9)
    assert outcome.what(several=True).startswith("were killed by SIGKILL")


def test_a_real_time_signal_has_a_number():
    lines, _ = fails(faulty.ends_by_number, 2, number=signal.SIGRTMIN + 1)
    assert lines[0].startswith(f"rank 0 was killed by signal {signal.SIGRTMIN + 1}, at ")


def test_a_message_shows_its_first_and_last_lines():
    lines, error = fails(faulty.complains, 2, "lines")
    assert lines[0].startswith("ranks 0 and 1 raised Talkative: line 0, at faulty.py:")
    assert lines[1:] == ["    line 1", "    line 2"]
    lines, error = fails(faulty.complains, 2, "many lines")
    assert [line.strip() for line in lines[1:]] == [
        *("line 1", "line 2", "line 3"),
        *("…", "line 98", "line 99"),
    ]
    assert "line 50" in error.tracebacks[1]


@pytest.mark.parametrize(
    "how, first, rest",
    [
        ("cause", "RuntimeError: no checkpoint", ["because of KeyError: 'weights'"]),
        (
            "group",
            "ExceptionGroup: two things (2 sub-exceptions)",
            ["ValueError: one", "TypeError: other"],
        ),
        (
            "loader",
            "ValueError: Caught ValueError in DataLoader worker process 0.",
            ["ValueError: sample 0 is torn"],
        ),
        ("itself", "RuntimeError: no checkpoint", []),
        ("context", "RuntimeError: no checkpoint", ["while handling KeyError: 'weights'"]),
        ("note", "ValueError: torn", ["sample 7 of part 2"]),
        (KeyError("no"), "Mute: (its message cannot be shown: KeyError)", []),
        (SystemExit(3), "Mute: (its message cannot be shown: SystemExit)", []),
        (KeyboardInterrupt(), "Mute: (its message cannot be shown: KeyboardInterrupt)", []),
    ],
)
def test_what_matters_in_a_message_is_shown(how, first, rest):
    lines, _ = fails(faulty.complains, 1, how, timeout=10)
    assert lines[0].startswith(f"rank 0 raised {first}, at faulty.py:")
    assert [line.strip() for line in lines[1:]] == rest


@pytest.mark.parametrize(
    "how, first, last",
    [
        ("recursion", "RuntimeError: at depth 0", "RecursionError: maximum recursion depth"),
        ("groups", "ExceptionGroup: group 499", "ValueError: the innermost"),
    ],
)
def test_a_thousand_causes_are_told_from_both_ends(how, first, last):
    lines, error = fails(faulty.complains, 2, how)
    assert lines[0].startswith(f"ranks 0 and 1 raised {first}")
    assert "…" in [line.strip() for line in lines] and last in lines[-1]
    assert first.split(": ")[1] in error.tracebacks[1]


def test_the_folders_of_a_long_path_go_before_the_reason():
    lines, _ = fails(faulty.complains, 1, "path")
    assert "/run.pt holds no readable checkpoint: /…/" in lines[0]
    assert "/run.pt is torn, at faulty.py:" in lines[0]


def test_the_fingerprints_of_collectives_are_left_out():
    fingerprint = (
        "CollectiveFingerPrint(SequenceNumber=0, OpType=ALLREDUCE, (float (default)))"
    )
    message = (
        f"Detected mismatch. Rank 0 is running collective: {fingerprint}, but Rank 1 is "
        f"running collective: {fingerprint}.Collectives differ in the following aspects: Op"
    )
    what = errors.RankOutcome(0, "raised", type="RuntimeError", message=message).what()
    assert what.startswith(
        "raised RuntimeError: Detected mismatch. … Collectives differ in the following "
    )


def test_what_was_printed_before_an_error_is_shown_with_it():
    _, error = fails(faulty.speaks_and_raises, 2)
    said = [f"rank {rank} │ {line}" for rank in (0, 1) for line in ("step 1", "loss 0.5")]
    assert error.__notes__ == ["\n".join(said)]
    assert error._render_traceback_()[-1] == "\n".join(said)


def test_half_a_line_is_kept_at_a_timeout():
    _, error = fails(faulty.speaks_and_hangs, 1, kind=RanksHung, timeout=0.5)
    assert error.report.stdout == ["half a line!"]


def test_a_result_that_is_too_deep_is_named():
    lines, _ = fails(faulty.returns_deep_lists, 2, timeout=20)
    assert lines[0].startswith("the result of rank 0 (list) cannot be sent between processes")


def test_a_result_that_cannot_be_loaded_is_named():
    lines, error = fails(faulty.returns_sealed, 2)
    assert lines[0].startswith(
        "the result of rank 0 was sent, and cannot be loaded here: "
        "RuntimeError: the seal is broken."
    )
    assert error.report.stdout == ["done\n", "done\n"]


@pytest.mark.slow
def test_last_words_are_those_of_this_launch(tmp_path):
    done = programs.start(
        """
        import os, sys
        from mgpu_tutorial.lab import launch
        if __name__ == "__mp_main__":
            how = open("how").read()
            if how == "raise":
                raise ImportError("the first problem")
            if how == "exit":
                os._exit(0)
        def worker(rank, world_size):
            return rank
        if __name__ == "__main__":
            for how in ("raise", "exit", "go on"):
                open("how", "w").write(how)
                try:
                    print(launch(worker, 2, timeout=2).results)
                except RuntimeError as error:
                    print(str(error).replace(chr(10), "|"))
        """,
        tmp_path,
    )
    out, err = done.communicate(timeout=100)
    assert out.splitlines() == [
        "ranks 0 and 1 left with exit code 1, at no line of the worker yet|"
        "    their last words: ImportError: the first problem "
        f"({tmp_path}/program.py, line 7)",
        "ranks 0 and 1 left with exit code 0, at no line of the worker yet",
        "[0, 1]",
    ], err


def test_a_full_disk_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(transfer, "disk_is_full", lambda folder: True)
    folder = tmp_path / "launch" / "rank0"
    with pytest.raises(OSError, match=f"no space is left on the disk of {tmp_path.parent}"):
        transfer.write([1], folder / "result", "the result")  # its folder is missing
    assert files.disk_is_full(tmp_path) == (psutil.disk_usage(str(tmp_path)).free < 2**16)


@pytest.mark.parametrize(
    "worker, options, name",
    [
        (faulty.with_option, {"timeout": 5}, "timeout"),
        (faulty.needs_option, {"device": "cpu"}, "device"),
        (faulty.needs_option, {}, "device"),
    ],
)
def test_a_parameter_with_a_name_of_launch_is_refused(worker, options, name):
    with pytest.raises(TypeError, match=f"has a parameter '{name}', which launch keeps"):
        launch(worker, 2, **options)


def test_a_parameter_with_a_name_of_launch_may_come_by_position():
    assert launch(faulty.with_option, 2, 7, timeout=5).results == [7, 7]
    assert launch(faulty.with_option, 1).results == [1]
    assert launch(faulty.passes_on, 1, batch=1).results == [["batch"]]


@pytest.mark.parametrize("device", [None, 0, ["cpu"]])
def test_a_device_of_another_type_is_refused(device):
    with pytest.raises(TypeError, match="device must be 'auto', 'cpu', 'cuda' or 'cuda:N'"):
        launch(faulty.total, 2, device=device)


def test_what_means_the_same_is_taken():
    report = launch(faulty.total, np.int64(2), device=torch.device("cpu"))
    assert report.results == [1.0, 1.0]
    with pytest.raises(TypeError, match="whole number of ranks, got float64"):
        launch(faulty.total, np.float64(2))


def test_the_variable_that_names_a_device_is_named(monkeypatch):
    monkeypatch.setenv("MGPU_DEVICE", "gpu")
    with pytest.raises(ValueError, match="by the variable MGPU_DEVICE: device must be"):
        launch(faulty.total, 2)


@pytest.mark.parametrize(
    "worker, name",
    [(partial(faulty.first_of_many), "first_of_many"), (faulty.Callable(), "Callable")],
)
def test_wrong_arguments_to_any_callable_are_explained(worker, name):
    lines, _ = fails(worker, 2)
    assert lines[0].startswith(f"{name}(rank, world_size, ")
    assert "missing a required argument" in lines[0]


def test_a_peer_may_be_a_number_of_numpy():
    events = launch(faulty.sends_to_a_numpy_rank, 2, trace=True).events
    assert [(event.rank, event.op, event.peer) for event in events] == [
        (0, "send", 1),
        (1, "recv", 0),
    ]


def test_a_rank_outside_of_a_group_records_its_call():
    events = launch(faulty.adds_in_a_group_of_one, 2, trace=True).events
    groups = [(event.rank, event.group) for event in events if event.op == "all_reduce"]
    assert groups == [(0, (0,)), (1, ())]


def test_torn_files_of_a_rank_do_not_hide_how_it_ended(tmp_path):
    job = files.Job(str(tmp_path), 0, 1, "gloo", "cpu", trace=True)
    job.home.mkdir()
    (job.home / "where").write_text('["train.py", 7, "work')
    assert running._last_seen(job) is None
    (job.home / "events").write_text('{"index": 0, "op": "ba\n{"index": 0, "end": 1.0}\n')
    assert trace.read(job.home / "events", 0, 0.0) == []


@pytest.mark.parametrize(
    "worker, word", [(faulty.asynchronous, "async function"), (faulty.generator, "generator")]
)
def test_a_worker_whose_body_would_not_run_is_refused(worker, word):
    with pytest.raises(TypeError, match=f"worker {worker.__name__} is an? {word}"):
        launch(worker, 2)


def test_a_current_folder_that_is_gone_is_named(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(RuntimeError, match="the current folder has been removed"):
        launch(faulty.total, 2)


def test_ranks_that_never_join_are_shown_where_they_are(monkeypatch, tmp_path):
    monkeypatch.setattr(running, "JOIN_LIMIT", 1.5)
    slow = tmp_path / "slow_module.py"
    slow.write_text(
        "import os, time\n"
        "time.sleep(60 * ('RANK' in os.environ))\n"
        "def worker(rank, world_size):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import slow_module

    lines, _ = fails(slow_module.worker, 2, kind=RanksHung, timeout=5)
    assert re.fullmatch(r"2 of 2 ranks had not joined after \d+ s", lines[0])
    assert lines[1].startswith("  rank 0 had not joined, and was at slow_module.py:2  time.")


def test_a_carriage_return_overwrites_the_line():
    report = launch(faulty.draws_a_bar, 1)
    assert report.lines(0) == ["step 4", "end"]
    assert report.stdout[0].count("\r") == 5


# What was wasted


def test_ranks_may_end_apart_without_a_wait():
    begin = time.monotonic()
    launch(faulty.ends_apart, 2)
    assert time.monotonic() - begin < 0.7 + running.EXIT_LIMIT * load_factor()


def test_a_loop_that_is_left_early_leaves_no_descriptor():
    assert launch(faulty.leaves_loops, 1).results == [0]


def test_output_without_end_is_stopped(monkeypatch):
    monkeypatch.setattr(files, "OUTPUT_LIMIT", 2**20)
    lines, error = fails(faulty.prints_without_end, 2, timeout=30)
    assert lines[0].startswith("rank 1 printed without end and was stopped, at faulty.py:")
    assert lines[1].startswith("  rank 0 was at faulty.py:")
    assert 2**20 < len(error.report.stdout[1]) < 2**20 + 100
    assert error.report.stdout[1].endswith("… cut here\n")


def test_a_small_view_of_a_large_tensor_travels_alone(tmp_path):
    large = torch.arange(1_000_000)
    transfer.write({"view": large[3:5], "all": [large, large]}, tmp_path / "both", "")
    transfer.write(large[3:5], tmp_path / "view", "")
    assert (tmp_path / "view").stat().st_size < 10_000
    assert (tmp_path / "both").stat().st_size < 8_100_000
    loaded = transfer.read(tmp_path / "both")
    assert torch.equal(loaded["view"], torch.tensor([3, 4]))
    first, second = loaded["all"]
    assert first.data_ptr() == second.data_ptr()  # what is whole keeps its aliasing
    assert launch(faulty.first_of_many, 1, 1_000_000).results[0].tolist() == [0]


# What launch promises besides


def test_threads_are_one_or_as_many_as_asked_for():
    assert launch(faulty.threads_and_variable, 1).results == [(1, "1")]
    assert launch(faulty.threads_and_variable, 1, threads=2).results == [(2, "2")]
    with pytest.raises(ValueError, match="threads must be a positive number"):
        launch(faulty.threads_and_variable, 1, threads=0)


@pytest.mark.slow
def test_under_torchrun_the_environment_decides_on_threads():
    source = """
        from mgpu_tutorial.lab.run.rank import under_torchrun
        from tests.lab import faulty, programs
        under_torchrun(faulty.threads_and_variable, {})
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    one |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env=os.environ | one | {"MGPU_DEVICE": "cpu", "PYTHONPATH": str(programs.ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert "[rank 0] returned (2, '2')" in done.stdout, done.stderr


@pytest.mark.parametrize("how", ["event", "program", "child", "peer"])
def test_only_a_wait_of_torch_is_one_for_a_peer(how):
    lines, _ = fails(faulty.waits_elsewhere, 2, how, kind=RanksHung, timeout=0.5)
    assert lines[1].startswith("  rank 0 was at faulty.py:") and ".wait()" in lines[1]
    assert any("in a real job" in line for line in lines) == (how == "peer")


def test_only_a_wait_for_others_is_compared_with_a_real_job():
    def dump(*frames):
        lines = [f'  File "{file}", line {line} in {name}' for file, line, name in frames]
        return "\n".join(["Current thread 0x01 (most recent call first):", *lines])

    enter = (source_lines.LAB + "run/rank.py", 1, "enter")
    c10d = str(Path(torch.__file__).parent / "distributed" / "distributed_c10d.py")
    own = ("/home/me/train.py", 7, "worker")
    assert source_lines.waiting_call(dump((c10d, 9, "recv"), own, enter)) == "recv"
    assert source_lines.waiting_call(dump(own, enter)) == ""
    escaped = (r"/home/andr\xe9/\u20ac.py", 7, "worker")  # as faulthandler writes it
    assert source_lines.of_dump(dump(escaped, enter)) == ("/home/andré/€.py", 7, "worker")
    hung = [errors.RankOutcome(0, "stopped", waits_in="recv")]
    report = errors.Report(world_size=1)
    assert "Timed out waiting 1800000ms for recv" in str(errors.hang(hung, 3, report))
    hung = [errors.RankOutcome(0, "stopped")]
    assert "real job" not in str(errors.hang(hung, 3, report))
