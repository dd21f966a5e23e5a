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
from pathlib import Path

from mgpu_tutorial.lab.record import source_lines
from mgpu_tutorial.lab.run import errors, files, server
from mgpu_tutorial.lab.run.errors import RankOutcome
from mgpu_tutorial.lab.run.files import Job, text_of
from mgpu_tutorial.lab.run.progress import ProgressBar
from mgpu_tutorial.lab.run.rank import enter

JOIN_LIMIT = 60.0  # seconds until all ranks must have joined: imports of their own
GRACE = 1.0  # seconds that the others get to end after the first failure
CULPRIT_LIMIT = 5.0  # the same, while all failures come of a loss that nobody explains
EXIT_LIMIT = 2.0  # seconds from the last worker's end to the last process's
SILENT_LIMIT = 10.0  # the same for a process that names nothing which keeps it
KILL_LIMIT = 5.0  # seconds until killed processes are gone
TICK = 0.02  # seconds between two looks; the end of a process wakes the kernel at once


class Ranks:
    """The processes of one launch."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.folder = Path(jobs[0].folder)
        self._processes: list[mp.Process] = []
        self._outcomes: dict[int, dict] = {}  # what each rank said of its end
        self._joined = False
        self._log_begin = server.log_size()

    def start(self, environments: list[dict[str, str]]) -> None:
        """Fork every rank. Raises RankFailed where the machine allows no more of them."""
        context = mp.get_context(server.METHOD)
        with server.answering_within(JOIN_LIMIT):
            for job, environment in zip(self.jobs, environments, strict=True):
                process = context.Process(target=enter, args=(job, environment))
                try:
                    if not server.is_alive():  # multiprocessing would start one of its own
                        raise EOFError
                    process.start()
                except (OSError, EOFError) as error:
                    log = ""
                    if isinstance(error, EOFError | ConnectionError):
                        server.await_end()
                        log = server.log(self._log_begin)
                    # a request that we could not finish ends the server too
                    server.replace()
                    raise errors.not_started(f"rank {job.rank}", error, log) from None
                self._processes.append(process)

    # Watch

    def watch(self, timeout: float) -> tuple[str, float]:
        """Wait until all is over: ("ended" | "failed" | "hung" | "late", seconds).

        The timeout counts from the moment at which all ranks had joined.
        """
        begin = time.monotonic()
        with ProgressBar(self.folder, len(self.jobs), timeout) as bar:
            if not self._wait(bar, lambda: self._all_joined() or self._failed(), JOIN_LIMIT):
                return "late", time.monotonic() - begin
            if self._joined:
                begin = time.monotonic()
            self._wait(bar, lambda: self._all_over() or self._failed(), timeout)
            if self._failed():
                self._await_others(bar, begin + timeout)
                return "failed", time.monotonic() - begin
            if not self._all_over():
                return "hung", time.monotonic() - begin
            self._await_exits()
            return "ended", self._seconds()

    def _wait(self, bar: ProgressBar, done: Callable[[], bool], seconds: float) -> bool:
        """Look at the ranks until `done()`; False if it is not after so many seconds."""
        begin = time.monotonic()
        while True:
            self._read_outcomes()
            if done():
                return True
            passed = time.monotonic() - begin
            if passed > seconds:
                return False
            bar.show(passed)
            connection.wait([p.sentinel for p in self._processes if p.is_alive()], TICK)

    def _await_others(self, bar: ProgressBar, end: float) -> None:
        """After a failure let the others end, and the culprit say what happened."""
        failed = time.monotonic()

        def patience_is_over() -> bool:
            return self._all_over() or time.monotonic() > failed + self._grace()

        self._wait(bar, patience_is_over, max(GRACE, end - failed))

    def _grace(self) -> float:
        """A culprit may close its connections some time before it says what happened."""
        said = self._outcomes.values()
        unexplained = all(o["kind"] == "raised" and o["lost_peer"] for o in said)
        return CULPRIT_LIMIT if unexplained else GRACE

    def _await_exits(self) -> None:
        """Give the processes time to end; a rank that cannot says so in its stderr."""
        begin = time.monotonic()
        living = list(zip(self.jobs, self._processes, strict=True))
        while living := [(job, process) for job, process in living if process.is_alive()]:
            passed = time.monotonic() - begin
            if passed > SILENT_LIMIT:
                return
            if passed > EXIT_LIMIT:
                living = [(job, process) for job, process in living if not _lasts(job)]
            connection.wait([process.sentinel for _, process in living], TICK)

    def _read_outcomes(self) -> None:
        ended = [not process.is_alive() for process in self._processes]  # first: they write
        for job, gone in zip(self.jobs, ended, strict=True):
            if job.rank in self._outcomes:
                continue
            with suppress(FileNotFoundError):
                text = (job.home / files.OUTCOME).read_text(encoding="utf-8")
                self._outcomes[job.rank] = json.loads(text)
                continue
            if gone:
                self._outcomes[job.rank] = {"kind": "died"}
            elif _printed(job) > files.OUTPUT_LIMIT:
                self._outcomes[job.rank] = {"kind": "flooded"}

    def _all_joined(self) -> bool:
        self._joined = all((job.home / files.READY).exists() for job in self.jobs)
        return self._joined

    def _failed(self) -> bool:
        return any(said["kind"] != "returned" for said in self._outcomes.values())

    def _all_over(self) -> bool:
        return len(self._outcomes) == len(self.jobs)

    def _seconds(self) -> float:
        """From the last rank's joining to the last worker's end, by the ranks' clocks."""
        said = self._outcomes.values()
        return max(o["ended"] for o in said) - max(o["began"] for o in said)

    # What became of them

    def outcomes(self) -> list[RankOutcome]:
        """How every rank ended, or where it is; asks the living for their stack."""
        said = {rank for rank, end in self._outcomes.items() if end["kind"] != "flooded"}
        asked = [
            job
            for job, process in zip(self.jobs, self._processes, strict=True)
            if process.is_alive() and job.rank not in said
        ]
        self._ask_for_stacks(asked)
        return [self._outcome(job) for job in self.jobs]

    def _ask_for_stacks(self, jobs: list[Job]) -> None:
        if not hasattr(signal, "SIGUSR1"):
            return
        asked = [job for job in jobs if (job.home / files.PID).exists()]
        for job in asked:
            with suppress(FileNotFoundError, ProcessLookupError):
                (job.home / files.STACK).write_text("")
                os.kill(self._processes[job.rank].pid, signal.SIGUSR1)
        end = time.monotonic() + 0.5
        while time.monotonic() < end and not all(
            source_lines.of_dump(text_of(job.home / files.STACK)) for job in asked
        ):
            time.sleep(0.004)

    def _outcome(self, job: Job) -> RankOutcome:
        said = self._outcomes.get(job.rank, {"kind": "stopped"})
        began = self._joined or (job.home / files.READY).exists()
        stack = text_of(job.home / files.STACK)
        seen = source_lines.of_dump(stack) or _last_seen(job)
        if said["kind"] in ("stopped", "flooded"):
            call = source_lines.waiting_call(stack)
            return RankOutcome(job.rank, said["kind"], seen, began=began, waits_in=call)
        if said["kind"] == "died":
            exitcode = self._processes[job.rank].exitcode
            words = self._last_words(job)
            return RankOutcome(
                job.rank, "died", seen, exitcode=exitcode, last_words=words, began=began
            )
        fields = {key: value for key, value in said.items() if key not in ("began", "ended")}
        if fields.get("where"):
            fields["where"] = source_lines.SourceLine(*fields["where"])
        return RankOutcome(rank=job.rank, began=began, **fields)

    def _last_words(self, job: Job) -> str:
        if not job.home.exists():
            return f"somebody has removed {job.home}, a folder of this launch"
        if files.disk_is_full(self.folder):
            return f"no space is left on the disk of {self.folder.parent.parent}"
        if not server.is_alive():
            return "the fork server, from which all ranks come, was killed"
        if (job.home / files.WHERE).exists():
            return errors.last_words(text_of(job.home / files.STDERR))
        return server.log(self._log_begin)  # it died before it could load anything

    # The end

    def stop(self) -> None:
        """Kill whatever still runs, with its children, and wait for it."""
        # Without the server nobody tells of a rank's end, and its children may live on.
        lost = not server.is_alive()
        for process in self._processes:
            if lost or process.is_alive():
                for kill in (os.kill, getattr(os, "killpg", os.kill)):
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
    if not hasattr(os, "killpg"):
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, 0)
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
    text = text_of(job.home / files.WHERE).strip(" \0")
    with suppress(ValueError, TypeError):  # torn, on a full disk
        return source_lines.SourceLine(*json.loads(text)) if text else None
    return None


def _lasts(job: Job) -> bool:
    """Whether the rank says what keeps it from ending; if so, its stderr tells that too."""
    names = text_of(job.home / files.LASTING)
    if names:
        with open(job.home / files.STDERR, "a", encoding="utf-8") as file:
            file.write(
                f"launch ended this process {EXIT_LIMIT:g} s after its worker had "
                f"returned: {names} was still at work\n"
            )
    return bool(names)
