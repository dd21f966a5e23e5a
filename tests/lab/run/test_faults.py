"""What goes wrong in real programs: every fault is named, in time, and leaves nothing."""

import builtins
import ctypes
import multiprocessing as mp
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial.lab import CannotTravel, RankFailed, RanksHung, launch
from mgpu_tutorial.lab.run import errors, files, server
from mgpu_tutorial.lab.run import ranks as running
from tests.lab import ranks
from tests.lab.run.conftest import after, noted, start

PLACE = re.compile(r"\w+\.py:\d+  ")


def fails(worker, world_size, *args, kind=RankFailed, timeout=2.0, **options):
    """The lines of the error, HERE for its places; in time on a core of one's own."""
    begin = time.monotonic()
    with pytest.raises(kind) as caught:
        launch(worker, world_size, *args, timeout=timeout, **options)
    load = max(1.0, os.getloadavg()[0] / os.cpu_count())
    assert time.monotonic() - begin < timeout + 3 * load
    return PLACE.sub("HERE  ", str(caught.value)).splitlines(), caught.value


# What one rank does, while the others wait for it


def one_does(rank, world_size, deed, *words):
    """Rank 1 does it as soon as it has noted where it is."""
    if rank == 1:
        time.sleep(0.2) or deed(*words)
    dist.barrier()


def fail(error):
    raise error


AT = "at HERE  time.sleep(0.2) or deed(*words)"


@pytest.mark.parametrize(
    "deed, words, says",
    [
        (fail, [ValueError("torn")], "raised ValueError: torn, at HERE  raise error"),
        (fail, [ValueError()], "raised ValueError, at HERE  raise error"),
        (sys.exit, [3], f"raised SystemExit: 3, {AT}"),
        (os._exit, [3], f"left with exit code 3, {AT}"),
        (os._exit, [0], f"left with exit code 0, {AT}"),
        (signal.raise_signal, [signal.SIGKILL], f"was killed by SIGKILL, {AT}"),
        (ctypes.string_at, [0], f"was killed by SIGSEGV, {AT}"),
    ],
)
def test_a_rank_that_fails_is_named_with_its_line_and_the_others_with_theirs(
    deed, words, says
):
    lines, _ = fails(one_does, 3, deed, *words)
    assert lines[0] == f"rank 1 {says}"
    assert lines[1:] == [f"  rank {rank} was at HERE  dist.barrier()" for rank in (0, 2)]


def test_a_rank_that_prints_without_end_is_stopped(monkeypatch):
    monkeypatch.setattr(files, "OUTPUT_LIMIT", 9000)
    monkeypatch.setattr(running, "GRACE", 0.1)
    lines, _ = fails(one_does, 2, lambda: [print("again") for _ in iter(int, 1)], timeout=20)
    assert lines[0].startswith("rank 1 printed without end and was stopped, at HERE")


def test_an_error_has_the_line_of_the_file_a_page_s_width_and_what_was_printed():
    says = partial(print, *["step"] * 11, "loss", sep="\n", end="")
    deed = [says, partial(fail, KeyError("weights"))]
    _, error = fails(one_does, 2, lambda: [call() for call in deed])
    line = fail.__code__.co_firstlineno + 1
    assert f"raised KeyError: 'weights', at test_faults.py:{line}  raise error" in str(error)
    assert "KeyError" in error.tracebacks[1]
    *shown, said = error._render_traceback_()  # broken at spaces for the page
    assert " ".join(shown).split() == f"RankFailed: {error}".split()
    assert max(map(len, shown)) <= 88
    lines = ["… 2 lines before these", *["step"] * 9, "loss"]
    assert error.__notes__ == [said] == ["\n".join(f"rank 1 │ {line}" for line in lines)]


# What several do


def refuse(rank, world_size, who):
    if rank in who:
        raise RuntimeError("Connection refused by the data base")  # sounds like a lost peer


def meet_nobody(rank, world_size):
    limit = timedelta(milliseconds=200)
    rank and dist.TCPStore("127.0.0.1", 1, 2, is_master=False, timeout=limit)


def raise_late(rank, world_size):
    time.sleep(0.4 if rank == 0 else 60)
    raise ValueError("too late for the others")


def die_at_once(rank, world_size):
    os.kill(os.getpid(), signal.SIGKILL)


class Sealed:
    def __reduce__(self):
        return fail, (RuntimeError("the seal is broken"),)


EARLY = "rank 1 returned while ranks 0 and 2 still waited for an answer|  rank 0 was at HERE|"


@pytest.mark.parametrize(
    "call, says",
    [
        ((lambda r, _: [][0] if r == 0 else 1 / 0, 2), "rank 0 raised Index|rank 1 raised Z"),
        ((refuse, 3, (0, 1, 2)), "ranks 0, 1 and 2 raised RuntimeError: Connection refused"),
        ((refuse, 3, (1,)), "rank 1 raised RuntimeError|  rank 0 had returned|  rank 2 had"),
        ((lambda r, _: r == 1 or dist.barrier(), 3), EARLY),
        ((meet_nobody, 2), "rank 1 raised DistNetworkError: The client socket has timed"),
        ((raise_late, 2), "rank 0 raised ValueError: too late for|  rank 1 was at HERE"),
        ((die_at_once, 1), "rank 0 was killed by SIGKILL, at HERE  def die_at_once(rank"),
        (
            (lambda *_: {"a": threading.Lock()}, 2),
            "ranks 0 and 1 raised CannotTravel: the result (dict) cannot",
        ),
        ((lambda *_: Sealed(), 2), "the result of rank 0 was sent, and cannot be"),
        ((lambda *_: launch(print, 2), 2), "rank 0 raised RuntimeError: launch() was called"),
        ((refuse, 2), "ranks 0 and 1 raised TypeError: refuse() missing 1 required"),
        ((ranks.total, 2, 7), "ranks 0 and 1 raised TypeError: total() takes 2 positional"),
    ],
    ids=range(12),
)
def test_the_cause_is_told_before_what_became_of_the_others(call, says):
    options = {"backend": "none"} if call[0] is meet_nobody else {}
    lines, _ = fails(*call, timeout=0.7 if call[0] is raise_late else 10.0, **options)
    begins = says.split("|")
    assert [line[: len(begin)] for line, begin in zip(lines, begins, strict=False)] == begins


# At the timeout


def wait(rank, world_size, how):
    print("half a line", end="")
    how(rank)
    time.sleep(60)


@pytest.mark.parametrize(
    "how, last",
    [
        (lambda rank: dist.send(torch.zeros(1), dst=1 - rank), "in a real job, after 30 min"),
        (lambda rank: rank or dist.recv(torch.zeros(1), src=1), "in a real job, after 30"),
        (lambda rank: dist.irecv(torch.zeros(1), src=1 - rank).wait(), "in a real job, aft"),
        (lambda rank: threading.Event().wait(), "rank 1 was at HERE  (lam"),
        (lambda rank: subprocess.Popen(["sleep", "60"]).wait(), "rank 1 was at HERE  (lam"),
        (lambda rank: sum(iter(int, 1)), "rank 1 was at HERE  (lambda"),  # deep in C code
    ],
    ids=["send", "receive", "irecv", "event", "program", "loop"],
)
def test_at_the_timeout_every_rank_is_shown_where_it_waits(request, how, last):
    lines, error = fails(wait, 2, how, kind=RanksHung, timeout=0.5, trace=True)
    kind = request.node.callspec.id
    assert lines[0] == "2 of 2 ranks had not returned after 0.5 s"
    assert lines[1].startswith("  rank 0 was at HERE  (lambda rank: ")
    assert lines[-1].startswith(f"  {last}")
    assert error.report.stdout == ["half a line"] * 2
    assert ("  deadlock: 0 → 1 → 0" in lines) == (kind == "send")
    assert ("  rank 0 waits in recv for rank 1" in lines) == (kind == "receive")


class Slow:
    def __init__(self, seconds):
        self.seconds = seconds

    def __reduce__(self):
        return time.sleep, (self.seconds,)  # where it is loaded, so before its rank joins


@pytest.mark.slow
def test_ranks_that_never_join_are_shown(monkeypatch):
    monkeypatch.setattr(running, "JOIN_LIMIT", 0.6)
    lines, _ = fails(one_does, 2, Slow(60), kind=RanksHung)
    assert re.fullmatch(r"2 of 2 ranks had not joined after \d+ s", lines[0])
    where = "no line of the worker yet|.*import .*"  # it imports still, where that is slow
    assert re.fullmatch(rf"  rank 0 had not joined, and was at ({where})", lines[1])


@pytest.mark.slow
def test_the_timeout_begins_when_all_have_joined():
    """And not a second before: then the work of 0.3 s would come too late."""
    assert launch(lambda *_: time.sleep(0.3), 2, Slow(1.0), timeout=1.0)


# Ranks that cannot end


def start_a_program(rank, world_size, folder, seconds=60):
    ranks.note(f"{folder}/pid.{rank}", subprocess.Popen(["sleep", "61"]).pid)
    tempfile.NamedTemporaryFile(delete=False).close()
    time.sleep(seconds)


def never_exit(rank, world_size, folder):
    start_a_program(rank, world_size, folder, 0)
    if rank == 0:
        threading.Thread(target=time.sleep, args=(60,)).start()
    elif rank == 1:
        ThreadPoolExecutor(1).submit(time.sleep, 60)
    elif rank == 2:
        mp.Process(target=time.sleep, args=(60,)).start()
    else:
        mp.Queue().put(bytes(10 * 2**20))
    return rank


def test_ranks_that_cannot_exit_are_ended_and_their_results_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(running, "EXIT_LIMIT", 0.5)
    report = launch(never_exit, 4, str(tmp_path), timeout=2)
    assert report.results == [0, 1, 2, 3]
    assert report.stderr == [running.TOO_LONG] * 4
    assert len(list(tmp_path.iterdir())) == 4
    assert after(5, partial(noted, tmp_path)) == []


def test_what_a_rank_started_ends_with_the_launch(tmp_path):
    fails(start_a_program, 2, str(tmp_path), kind=RanksHung, timeout=0.6)
    assert len(list(tmp_path.glob("pid.*"))) == 2
    assert after(5, partial(noted, tmp_path)) == []


def write_in_a_thread(rank, world_size, path):
    def write_later():
        time.sleep(0.7)  # longer than a rank that has returned stays for the others
        Path(path).write_text("all of it")

    rank == 0 and threading.Thread(target=write_later).start()
    time.sleep(0.9 * rank)


def test_a_thread_may_finish_its_file_after_the_worker(tmp_path):
    launch(write_in_a_thread, 2, str(tmp_path / "checkpoint"), timeout=20)
    assert (tmp_path / "checkpoint").read_text() == "all of it"


# The fork server


@pytest.mark.slow
def test_a_fork_server_that_is_killed_during_a_launch_is_named(tmp_path):
    def kill():
        after(10, lambda: len(noted(tmp_path)) < 2)
        time.sleep(0.2)  # until both have left a note of where they are
        os.kill(server.borrowed.fork_server_pid(), signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    lines, _ = fails(ranks.sleeper, 2, str(tmp_path / "pid"), timeout=20)
    thread.join()
    assert lines[0].startswith("ranks 0 and 1 left with exit code 255, at HERE")
    assert launch(ranks.total, 2).results == [1.0, 1.0]


@pytest.mark.slow
def test_what_stops_a_server_or_a_rank_before_its_worker_is_told(tmp_path):
    """A torn module in the way of the server; a program that its ranks cannot import."""
    done = start(
        """
        import pathlib
        from mgpu_tutorial.lab import launch
        from tests.lab.ranks import total
        if __name__ == "__mp_main__" and pathlib.Path("torn").exists():
            raise ImportError("the first problem")
        if __name__ == "__mp_main__" and pathlib.Path("unguarded").exists():
            launch(total, 2)
        if __name__ == "__main__":
            for name in ("queue.py", "torn", "unguarded", "nothing"):
                path = pathlib.Path(name)
                path.write_text("this is no Python")
                try:
                    print(launch(total, 2).results)
                except RuntimeError as error:
                    print(str(error).replace(chr(10), "|"))
                path.unlink()
        """,
        tmp_path,
    )
    out, err = done.communicate(timeout=100)
    torn, program, unguarded, works = out.splitlines()
    assert torn.startswith("the fork server could not be started: SyntaxError"), err
    assert torn.endswith("queue.py, line 1)")
    assert program == (
        "ranks 0 and 1 left with exit code 1, at no line of the worker yet|"
        "    their last words: ImportError: the first problem "
        f"({tmp_path}/program.py, line 6)"
    )
    assert 'Put the call under if __name__ == "__main__":' in unguarded
    assert works == "[1.0, 1.0]"


def test_a_temporary_folder_of_too_long_a_name_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(files.util, "get_temp_dir", lambda: str(tmp_path / ("long" * 20)))
    with pytest.raises(OSError, match="set TMPDIR to a short one"):
        launch(ranks.total, 2)


# What a message says


def lose_the_weights():
    try:
        {}["weights"]
    except KeyError as error:
        raise RuntimeError("no checkpoint") from error


def hide_the_weights():
    try:
        {}["weights"]
    except KeyError:
        raise RuntimeError("no checkpoint") from None


def raised_by(deed):
    with pytest.raises(BaseException) as caught:
        deed()
    return caught.value


LINES = [f"line {n}" for n in range(100)]
THREE, MANY = "\n".join(LINES[:3]), "\n".join(LINES)
OF_A_LOADER = f"Caught it\nTraceback (most recent call last):\n{MANY}\ntorn"
PRINT = "CollectiveFingerPrint(SequenceNumber=0, OpType=ALLREDUCE, (float (default)))"
MISMATCH = (
    f"Detected mismatch. Rank 0 is running collective: {PRINT}, but Rank 1 is running "
    f"collective: {PRINT}.Collectives differ in the following aspects: Op"
)


class Silent(Exception):
    def __str__(self):
        raise KeyboardInterrupt


NOTED = ValueError("torn")
NOTED.add_note("sample 7 of part 2")


@pytest.mark.parametrize(
    "error, first, rest",
    [
        (ValueError(THREE), "ValueError: line 0", LINES[1:3]),
        (ValueError("a" * 220), f"ValueError: {'a' * 220}, at", []),
        (ValueError("a" * 221), f"ValueError: {'a' * 110} … {'a' * 110}, at", []),
        (ValueError(MANY), "ValueError: line 0", [*LINES[1:4], "…", *LINES[98:]]),
        (ValueError(OF_A_LOADER), "ValueError: Caught it", ["torn"]),
        (NOTED, "ValueError: torn", ["sample 7 of part 2"]),
        (raised_by(lose_the_weights), "RuntimeError: n", ["because of KeyError: 'weights'"]),
        (raised_by(hide_the_weights), "RuntimeError: no checkpoint", []),
        (RuntimeError(MISMATCH), "RuntimeError: Detected mismatch. … Collectives differ", []),
        (Silent(), "Silent: <exception str() failed>", []),
    ],
    ids=range(10),
)
def test_what_matters_in_a_message_is_shown(error, first, rest):
    what = errors.RankOutcome(0, **errors.outcome_of(error)).what().splitlines()
    assert what[0].startswith(f"raised {first}") and ", at " in what[0]
    assert rest == [line.strip() for line in what[1:]]


# What cannot travel


def in_a_cell(source: str):
    """The function `worker` as a notebook cell defines it: in __main__, without a file."""
    space = {"__name__": "__main__", "__builtins__": builtins, "lock": threading.Lock()}
    exec(source, space)
    return space["worker"]


@pytest.mark.parametrize(
    "worker, args, part",
    [
        (refuse, [1, {"lock": threading.Lock()}], r"argument 1 \(dict\)"),
        (partial(refuse), [(i for i in [])], r"argument 0 \(generator\)"),
    ],
)
def test_what_cannot_travel_is_named(worker, args, part):
    with pytest.raises(CannotTravel, match=part) as refused:
        launch(worker, 2, *args)
    assert "transfer.py" not in "".join(refused.value._render_traceback_())


def test_what_a_function_uses_and_cannot_travel_is_named_whoever_calls_it():
    worker = in_a_cell("""
import threading
LOCK = threading.Lock()
def even(n):
    return n == 0 or odd(n - 1)
def odd(n):
    with LOCK:
        return n != 0 and even(n - 1)
def worker(rank, world_size):
    return even(rank)
""")
    with pytest.raises(CannotTravel, match="uses `LOCK`"):
        launch(worker, 2)


def test_what_a_worker_of_a_cell_uses_travels_with_it():
    worker = in_a_cell("""
FACTOR = 10
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
def worker(rank, world_size, *, shift):
    return FACTOR * rank + shift(rank) + fibonacci(20)
""")
    assert launch(worker, 2, shift=lambda rank: rank + 1).results == [6766, 6777]


def test_a_cached_and_a_dispatched_function_of_a_cell_travel():
    worker = in_a_cell("""
from functools import cache, singledispatch
@cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
@singledispatch
def doubled(value):
    return 2 * value
@doubled.register
def _(value: str):
    return f"{value} {value}"
def worker(rank, world_size):
    return fibonacci(20), doubled(rank), doubled("a")
""")
    assert launch(worker, 2).results == [(6765, 0, "a a"), (6765, 2, "a a")]


# What cannot work


@pytest.mark.parametrize(
    "worker, size, options, kind, says",
    [
        (None, 2, {}, TypeError, r"Write launch\(worker, 2\)"),
        (ranks.total, 2, {}, ValueError, r"device \(or MGPU_DEVICE\) must be"),
        *(
            (ranks.total, size, {}, ValueError, "world_size must be a whole number")
            for size in (0, -1, 65, "2", True, 2.0)
        ),
        *(
            (ranks.total, 2, {"timeout": seconds}, ValueError, "timeout must be a positive")
            for seconds in (0, -1, "3", None, float("inf"), float("nan"))
        ),
        *(
            (ranks.total, 2, {"device": device}, ValueError, "device")
            for device in ("gpu", "cuda", "cuda:x", "cuda:1", "", 0, None)
        ),
    ],
)
def test_a_launch_that_cannot_work_is_refused(monkeypatch, worker, size, options, kind, says):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("MGPU_DEVICE", "gpu")
    with pytest.raises(kind, match=says) as refused:
        launch(worker, size, **options)
    assert "\n".join(refused.value._render_traceback_()).count("\n") < 5  # no frame of ours
