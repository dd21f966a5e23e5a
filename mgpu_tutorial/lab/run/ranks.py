"""The ranks of one launch: start them, watch over them, and leave nothing behind.

Each rank is a process of its own, forked from a server that has torch imported already.
It tells how it ended in a file (see files.py), so that the others can still say where they
are when one has failed; the kernel waits for the processes and reads these files.
"""

import json
import multiprocessing as mp
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection

from mgpu_tutorial.lab.record import source_lines
from mgpu_tutorial.lab.run import errors, files, server
from mgpu_tutorial.lab.run.errors import RankOutcome
from mgpu_tutorial.lab.run.files import Job, text_of
from mgpu_tutorial.lab.run.progress import ProgressBar
from mgpu_tutorial.lab.run.rank import enter

JOIN_LIMIT = 60.0  # seconds until all ranks must have joined: imports of their own
GRACE = 1.0  # seconds that the others get to end after the first failure
CULPRIT_LIMIT = 4.0  # and as many more while nobody explains why a peer is gone
EXIT_LIMIT = 10.0  # seconds from the last worker's end to the last process's
KILL_LIMIT = 5.0  # seconds until killed processes are gone
TICK = 0.02  # seconds between two looks; the end of a process wakes the kernel at once


class Ranks:
    """The processes of one launch."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.folder = jobs[0].folder
        self._processes: list[mp.Process] = []
        self._outcomes: dict[int, RankOutcome] = {}  # of those that have ended
        self._joined = False
        self._written = len(server.log())

    def start(self, environments: list[dict[str, str]]) -> None:
        """Fork every rank. Raises RankFailed where the machine allows no more of them."""
        calls = zip(self.jobs, environments, strict=True)
        processes = [server.FORKS.Process(target=enter, args=call) for call in calls]
        names = [f"rank {job.rank}" for job in self.jobs]
        try:
            server.fork(dict(zip(names, processes, strict=True)), JOIN_LIMIT, self._written)
        finally:
            self._processes = [process for process in processes if process.pid]

    # Watch

    def watch(self, timeout: float) -> tuple[str, float]:
        """Wait until all is over: ("ended" | "failed" | "hung", seconds).

        The timeout counts from the moment at which all ranks had joined.
        """
        begin = time.monotonic()
        with ProgressBar(self.folder, len(self.jobs), timeout) as bar:
            if not self._wait(bar, lambda: self._joined or self._failed(), JOIN_LIMIT):
                return "hung", time.monotonic() - begin
            if self._joined:
                begin = time.monotonic()
            self._wait(bar, lambda: self._all_over() or self._failed(), timeout)
            if self._failed():
                self._wait(bar, self._all_over, GRACE)
                left = min(CULPRIT_LIMIT, begin + timeout - time.monotonic())
                self._wait(bar, lambda: self._all_over() or self._explained(), left)
                return "failed", time.monotonic() - begin
            if not self._all_over():
                return "hung", time.monotonic() - begin
            self._wait(bar, lambda: not self._living(), EXIT_LIMIT)
            said = self._outcomes.values()
            return "ended", max(o.ended for o in said) - max(o.began for o in said)

    def _wait(self, bar: ProgressBar, done: Callable[[], bool], seconds: float) -> bool:
        """Look at the ranks until `done()`; False if it is not after so many seconds."""
        begin = time.monotonic()
        while True:
            self._look()
            if done():
                return True
            passed = time.monotonic() - begin
            if passed > seconds:
                return False
            bar.show(passed)
            connection.wait([p.sentinel for p in self._processes if p.is_alive()], TICK)

    def _look(self) -> None:
        """Take note of who has joined and of who has ended."""
        living = set(self._living())  # first: they write, and then they end
        self._joined = self._joined or all(
            (job.home / files.READY).exists() for job in self.jobs
        )
        for job in self.jobs:
            if job.rank in self._outcomes:
                continue
            if (job.home / files.OUTCOME).exists():
                said = (job.home / files.OUTCOME).read_text(encoding="utf-8")
                self._outcomes[job.rank] = RankOutcome(job.rank, **json.loads(said))
            elif job not in living:
                self._outcomes[job.rank] = RankOutcome(job.rank, "died")
            elif _printed(job) > files.OUTPUT_LIMIT:
                self._outcomes[job.rank] = RankOutcome(job.rank, "flooded")

    def _living(self) -> list[Job]:
        pairs = zip(self.jobs, self._processes, strict=True)
        return [job for job, process in pairs if process.is_alive()]

    def _failed(self) -> bool:
        return any(outcome.kind != "returned" for outcome in self._outcomes.values())

    def _all_over(self) -> bool:
        return len(self._outcomes) == len(self.jobs)

    def _explained(self) -> bool:
        """A culprit may close its connections some time before it says what happened."""
        return any(not outcome.lost_peer for outcome in self._outcomes.values())

    # What became of them

    def outcomes(self) -> list[RankOutcome]:
        """How every rank ended, or where it is; asks the living for their stack."""
        for job in self.jobs:
            self._outcomes.setdefault(job.rank, RankOutcome(job.rank, "stopped"))
        asked = [job for job in self._living() if self._outcomes[job.rank].is_stopped]
        asked = [job for job in asked if (job.home / files.PID).exists()]
        for job in asked:
            with suppress(FileNotFoundError, ProcessLookupError):
                (job.home / files.STACK).write_text("")
                os.kill(self._processes[job.rank].pid, signal.SIGUSR1)
        end = time.monotonic() + 0.5
        while time.monotonic() < end and not all(
            source_lines.of_dump(text_of(job.home / files.STACK)) for job in asked
        ):
            time.sleep(0.004)
        return [self._outcome(job) for job in self.jobs]

    def _outcome(self, job: Job) -> RankOutcome:
        """What the rank has said of its end, with what it has left in its files."""
        outcome = self._outcomes[job.rank]
        outcome.joined = self._joined or (job.home / files.READY).exists()
        stack = text_of(job.home / files.STACK)
        if outcome.is_stopped or outcome.kind == "died":
            outcome.where = source_lines.of_dump(stack) or _last_seen(job)
        if outcome.is_stopped:
            outcome.waits_in = source_lines.waiting_call(stack)
        if outcome.kind == "died":
            outcome.exitcode = self._processes[job.rank].exitcode
            outcome.last_words = self._last_words(job)
        return outcome

    def _last_words(self, job: Job) -> str:
        if not job.home.exists():
            return f"somebody has removed {job.home}, a folder of this launch"
        if self._processes[job.rank].exitcode == 255:  # or nobody was left to tell its code
            end = time.monotonic() + 0.5
            while server.is_alive() and time.monotonic() < end:  # a process dies bit by bit
                time.sleep(0.01)
        if not server.is_alive():
            return "the fork server, from which all ranks come, was killed"
        if (job.home / files.WHERE).exists():
            return errors.last_words(text_of(job.home / files.STDERR))
        return server.error_since(self._written)  # it died before it could load anything

    # The end

    def stop(self) -> None:
        """Kill whatever still runs, with its children, and wait for it."""
        # Without the server nobody tells of a rank's end, and its children may live on.
        lost = not server.is_alive()
        for process in self._processes:
            if lost or process.is_alive():
                for kill in (os.kill, os.killpg):
                    with suppress(ProcessLookupError, PermissionError):
                        kill(process.pid, signal.SIGKILL)
        end = time.monotonic() + KILL_LIMIT
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        if any(process.is_alive() for process in self._processes):
            server.replace()  # it cannot tell of their end; its own end does
        for job, process in zip(self.jobs, self._processes, strict=False):
            _end_group(process.pid)
            with suppress(OSError):
                (job.home / files.PID).unlink()  # whoever gets this number next is not ours
            with suppress(ValueError):  # the kernel of the machine has it
                process.close()
        self._processes.clear()


def _end_group(leader: int) -> None:
    """Kill what a rank that has ended left in its process group.

    As long as the group lives, no other process gets its number; a process of that
    number is therefore a stranger's.
    """
    with suppress(ProcessLookupError, PermissionError):
        try:
            os.kill(leader, 0)
        except ProcessLookupError:
            os.killpg(leader, signal.SIGKILL)


def _printed(job: Job) -> int:
    """The bytes that a rank has printed."""
    size = 0
    for name in (files.STDOUT, files.STDERR):
        with suppress(FileNotFoundError):
            size += (job.home / name).stat().st_size
    return size


def _last_seen(job: Job) -> source_lines.SourceLine | None:
    with suppress(ValueError, TypeError):  # none, or torn on a full disk
        return source_lines.SourceLine(
            *json.loads(text_of(job.home / files.WHERE).strip(" \0"))
        )
    return None
