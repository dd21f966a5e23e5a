"""The ranks of one launch: start them, watch over them, and leave nothing behind.

A rank tells how it ended in a file (files.py), so that the others can still say where they
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
EXIT_LIMIT = 5.0  # seconds from the last worker's end, for threads and children of a rank
KILL_LIMIT = 5.0  # seconds until killed processes are gone
TOO_LONG = (
    f"launch ended this process {EXIT_LIMIT:g} s after all workers had returned: "
    "a thread or a process of its worker was still at work\n"
)
TICK = 0.02  # seconds between two looks; the end of a process wakes the kernel at once


class Ranks:
    """The processes of one launch."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self._processes: list[mp.Process] = []
        self._outcomes: dict[int, RankOutcome] = {}  # of those that have ended
        self._joined = False

    def start(self, environments: list[dict[str, str]]) -> None:
        """Fork every rank. Raises RankFailed where the machine allows no more of them."""
        calls, make = zip(self.jobs, environments, strict=True), server.FORKS.Process
        processes = [make(None, enter, f"rank {call[0].rank}", call) for call in calls]
        try:
            server.fork(processes)
        finally:
            self._processes = [process for process in processes if process.pid]

    def watch(self, timeout: float) -> tuple[str, float]:
        """Wait until all is over: ("ended" | "failed" | "hung", seconds).

        "hung": none had failed, but not all had joined after JOIN_LIMIT, or not all had
        ended at the timeout, which counts from the moment at which all had joined.
        """
        begin = time.monotonic()
        with ProgressBar([job.home for job in self.jobs], timeout) as bar:
            if not self._wait(bar, lambda: self._joined or self._failed(), JOIN_LIMIT):
                return "hung", time.monotonic() - begin
            if self._joined:
                begin = time.monotonic()
            self._wait(bar, lambda: self._all_over() or self._failed(), timeout)
            if self._failed():
                self._wait(bar, self._all_over, GRACE)
                return "failed", time.monotonic() - begin
            if not self._all_over():
                return "hung", time.monotonic() - begin
            self._wait(bar, lambda: not self._living(), EXIT_LIMIT)
            for job in self._living():
                with open(job.home / files.STDERR, "a") as file:
                    file.write(TOO_LONG)
            said = self._outcomes.values()  # from the last begin to the last end
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
        ready = ((job.home / files.READY).exists() for job in self.jobs)
        self._joined = self._joined or all(ready)
        for job in [job for job in self.jobs if job.rank not in self._outcomes]:
            if (job.home / files.OUTCOME).exists():
                said = (job.home / files.OUTCOME).read_text(encoding="utf-8")
                self._outcomes[job.rank] = RankOutcome(job.rank, **json.loads(said))
            elif job not in living:
                self._outcomes[job.rank] = RankOutcome(job.rank, "died")
            elif _printed(job) > files.OUTPUT_LIMIT:  # the disk is not ours to fill
                self._outcomes[job.rank] = RankOutcome(job.rank, "flooded")

    def _living(self) -> list[Job]:
        pairs = zip(self.jobs, self._processes, strict=True)
        return [job for job, process in pairs if process.is_alive()]

    def _failed(self) -> bool:
        return any(outcome.kind != "returned" for outcome in self._outcomes.values())

    def _all_over(self) -> bool:
        return len(self._outcomes) == len(self.jobs)

    def outcomes(self) -> list[RankOutcome]:
        """How every rank ended, or where it is; asks the living for their stack."""
        for job in self.jobs:
            self._outcomes.setdefault(job.rank, RankOutcome(job.rank, "stopped"))
        asked = [job for job in self._living() if self._outcomes[job.rank].is_stopped]
        # Before its file PID is there, a rank would die of the signal.
        asked = [job for job in asked if (job.home / files.PID).exists()]
        for job in asked:
            with suppress(ProcessLookupError):
                os.kill(self._processes[job.rank].pid, signal.SIGUSR1)
        end = time.monotonic() + 0.5
        stacks = [job.home / files.STACK for job in asked]
        while time.monotonic() < end and not all(
            map(source_lines.of_dump, map(text_of, stacks))
        ):
            time.sleep(0.004)
        return [self._outcome(job) for job in self.jobs]

    def _outcome(self, job: Job) -> RankOutcome:
        """How `_look` found that the rank ended, with what its files say of the place."""
        outcome = self._outcomes[job.rank]
        outcome.joined = self._joined or (job.home / files.READY).exists()
        stack = text_of(job.home / files.STACK)
        trail = text_of(job.home / files.WHERE)
        last_seen = json.loads(trail) if trail else None
        outcome.where = outcome.where or source_lines.of_dump(stack) or last_seen
        if outcome.is_stopped:
            outcome.waits_in = source_lines.waiting_call(stack)
        if outcome.kind == "died":
            outcome.exitcode = self._processes[job.rank].exitcode
            said = errors.last_words(text_of(job.home / files.STDERR))
            is_loaded = (job.home / files.WHERE).exists()
            outcome.last_words = said if is_loaded else server.last_error()
        return outcome

    def stop(self) -> None:
        """Kill whatever still runs, with its children, and wait for it."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        end = time.monotonic() + KILL_LIMIT
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
            _end_group(process.pid)


def _end_group(leader: int) -> None:
    """Kill what a rank that has ended left in its process group.

    While the group lives, no other process gets its number: one that has it is a stranger's.
    """
    with suppress(ProcessLookupError, PermissionError):
        try:
            os.kill(leader, 0)
        except ProcessLookupError:
            os.killpg(leader, signal.SIGKILL)


def _printed(job: Job) -> int:
    paths = [job.home / name for name in (files.STDOUT, files.STDERR)]
    return sum(path.stat().st_size for path in paths if path.exists())
