"""Start the ranks, watch over them, and leave nothing behind.

Each rank is a process of its own, forked from a server that has torch imported already.
It tells how it ended in a file (see rank.py), so that the others can still say where they
are when one has failed; the kernel waits for the processes and reads these files.
"""

import json
import multiprocessing as mp
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from tempfile import mkdtemp

from mgpu_tutorial.lab.record import source_lines
from mgpu_tutorial.lab.run import errors, server
from mgpu_tutorial.lab.run.errors import RankOutcome
from mgpu_tutorial.lab.run.progress_bar import ProgressBar
from mgpu_tutorial.lab.run.rank import Job, enter

SERVER_LIMIT = 120.0  # seconds for the fork server's imports, on a busy machine
JOIN_LIMIT = 60.0  # seconds until all ranks must have joined: imports of their own
GRACE = 1.0  # seconds that the others get to end after the first failure
CULPRIT_LIMIT = 5.0  # the same, while all failures come of a loss that nobody explains
EXIT_LIMIT = 2.0  # seconds from the last worker's end to the last process's
SILENT_LIMIT = 10.0  # the same for a process that names nothing which keeps it
KILL_LIMIT = 5.0  # seconds until killed processes are gone
LAST_WORDS = 2.0  # seconds that a fork server which has hung up gets to say why
OUTPUT_LIMIT = 32 * 2**20  # bytes that one rank may print
TICK = 0.02  # seconds between two looks; the end of a process wakes the kernel at once


@contextmanager
def workspace(world_size: int) -> Iterator[Path]:
    """A folder for one launch, inside the kernel's own temporary folder, then gone."""
    folder = Path(mkdtemp(prefix="launch-", dir=server.kernel_folder()))
    try:
        for rank in range(world_size):
            (folder / f"rank{rank}").mkdir(mode=0o700)  # whatever the umask
        (folder / "tmp").mkdir()
        yield folder
    finally:
        end = time.monotonic() + 5
        while folder.exists() and time.monotonic() < end:
            shutil.rmtree(folder, ignore_errors=True)
            if folder.exists():
                time.sleep(0.01)


def await_server() -> None:
    """The first process takes as long as the imports; let Ctrl-C reach this wait.

    A server that ended since the last launch, or does not answer, is replaced once.
    """
    for attempt in (1, 2):
        server.start()
        if server.METHOD != "forkserver" or server.is_warm():
            return
        begin = server.log_size()
        if server.notebook_kernel() and server.importing():
            import_meanwhile()
        context = mp.get_context(server.METHOD)
        first = context.Process(target=time.sleep, args=(0,), daemon=True)
        try:
            with server.answering_within(SERVER_LIMIT):
                first.start()
                first.join()
            if first.exitcode == 255:  # what is told of a process whose server has ended
                raise EOFError
            server.note_warm()
            return
        except (OSError, EOFError) as error:
            server.await_end(LAST_WORDS)
            server.replace()
            if attempt == 2:
                raise errors.not_started(
                    "the fork server", error, server.log(begin)
                ) from None
        finally:
            if first.is_alive():
                first.kill()


def import_meanwhile() -> None:
    """Import what the next cells need and what takes long: for drawings, for comparisons."""
    import matplotlib.figure  # noqa: F401
    import sympy  # noqa: F401  torch.testing.assert_close needs it


class Ranks:
    """The processes of one launch."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self.folder = Path(jobs[0].folder)
        self._processes: list[mp.Process] = []
        self._outcomes: dict[int, dict] = {}
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
                        server.await_end(LAST_WORDS)
                        log = server.log(self._log_begin)
                    # a request that we could not finish ends the server too
                    server.replace()
                    raise errors.not_started(f"rank {job.rank}", error, log) from None
                self._processes.append(process)

    def watch(self, timeout: float) -> tuple[str, float]:
        """Wait until all is over: ("ended" | "failed" | "hung" | "late", seconds).

        The timeout counts from the moment at which all ranks had joined.
        """
        started = time.monotonic()
        begin: float | None = None
        failed: float | None = None
        with ProgressBar(self.folder, len(self.jobs), timeout) as bar:
            while True:
                self._read_outcomes()
                now = time.monotonic()
                if begin is None and all((job.home / "ready").exists() for job in self.jobs):
                    begin = now
                if failed is None and self._has_failed():
                    failed = now
                if failed is None and self._all_over():
                    self._await_exits()
                    return "ended", self._seconds()
                if failed is not None and (self._all_over() or now > failed + self._grace()):
                    return "failed", now - (begin or started)
                if begin is None and now > started + JOIN_LIMIT:
                    return "late", now - started
                if begin is not None and now > begin + timeout:
                    return "hung" if failed is None else "failed", now - begin
                bar.show(now - (begin or started))
                self._await_change()

    def _read_outcomes(self) -> None:
        ended = [not process.is_alive() for process in self._processes]  # first: they write
        for job, gone in zip(self.jobs, ended, strict=True):
            if job.rank in self._outcomes:
                continue
            with suppress(FileNotFoundError):
                text = (job.home / "outcome").read_text(encoding="utf-8")
                self._outcomes[job.rank] = json.loads(text)
                continue
            if gone:
                self._outcomes[job.rank] = {"kind": "died"}
            elif self._output(job) > OUTPUT_LIMIT:
                self._outcomes[job.rank] = {"kind": "flooded"}

    def _output(self, job: Job) -> int:
        sizes = 0
        for name in ("stdout", "stderr"):
            with suppress(FileNotFoundError):
                sizes += (job.home / name).stat().st_size
        return sizes

    def _has_failed(self) -> bool:
        return any(found["kind"] != "returned" for found in self._outcomes.values())

    def _grace(self) -> float:
        """A culprit may close its connections some time before it says what happened."""
        found = self._outcomes.values()
        unexplained = all(o["kind"] == "raised" and o["lost_peer"] for o in found)
        return CULPRIT_LIMIT if unexplained else GRACE

    def _all_over(self) -> bool:
        return len(self._outcomes) == len(self.jobs)

    def _seconds(self) -> float:
        """From the last rank's joining to the last worker's end, by the ranks' clocks."""
        found = self._outcomes.values()
        return max(o["ended"] for o in found) - max(o["began"] for o in found)

    def _await_change(self) -> None:
        living = [p.sentinel for p in self._processes if p.is_alive()]
        pause = TICK if living else TICK / 4
        if len(living) < len(self._processes) or not living:
            time.sleep(pause)
        else:
            connection.wait(living, pause)

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

    def outcomes(self) -> list[RankOutcome]:
        """How every rank ended, or where it is; asks the living for their stack."""
        said = {rank for rank, found in self._outcomes.items() if found["kind"] != "flooded"}
        asked = [
            job
            for job, process in zip(self.jobs, self._processes, strict=True)
            if process.is_alive() and job.rank not in said
        ]
        self._ask_for_stacks(asked)
        return [self._outcome(job) for job in self.jobs]

    def stop(self) -> None:
        """Kill whatever still runs, with its children, and wait for it."""
        # Without the server nobody tells of a rank's end, and its children may live on.
        lost = not server.is_alive()
        for process in self._processes:
            if lost or process.is_alive():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(process.pid, signal.SIGKILL)
                with suppress(ProcessLookupError, PermissionError, AttributeError):
                    os.killpg(process.pid, signal.SIGKILL)
        end = time.monotonic() + KILL_LIMIT
        for process in self._processes:
            process.join(max(0.0, end - time.monotonic()))
        if any(process.is_alive() for process in self._processes):
            server.replace()  # it cannot tell of their end; its own end does
        for job, process in zip(self.jobs, self._processes, strict=False):
            server.end_group(process.pid)
            with suppress(OSError):
                (job.home / "pid").unlink()  # whoever gets this number next is not ours
            with suppress(ValueError):  # the kernel of the machine has it
                process.close()
        self._processes.clear()

    def _ask_for_stacks(self, jobs: list[Job]) -> None:
        if not hasattr(signal, "SIGUSR1"):
            return
        asked = [job for job in jobs if (job.home / "pid").exists()]
        for job in asked:
            (job.home / "stack").write_text("")
            with suppress(ProcessLookupError):
                os.kill(self._processes[job.rank].pid, signal.SIGUSR1)
        end = time.monotonic() + 0.5
        while time.monotonic() < end and not all(
            source_lines.of_dump(text_of(job.home / "stack")) for job in asked
        ):
            time.sleep(0.004)

    def _outcome(self, job: Job) -> RankOutcome:
        found = self._outcomes.get(job.rank, {"kind": "stopped"})
        began = (job.home / "ready").exists()
        stack = text_of(job.home / "stack")
        seen = source_lines.of_dump(stack) or _last_seen(job)
        if found["kind"] in ("stopped", "flooded"):
            call = source_lines.waiting_call(stack)
            return RankOutcome(job.rank, found["kind"], seen, began=began, waits_in=call)
        if found["kind"] == "died":
            exitcode = self._processes[job.rank].exitcode
            words = self._last_words(job)
            return RankOutcome(
                job.rank, "died", seen, exitcode=exitcode, last_words=words, began=began
            )
        fields = {key: value for key, value in found.items() if key not in ("began", "ended")}
        if fields.get("where"):
            fields["where"] = source_lines.SourceLine(*fields["where"])
        return RankOutcome(rank=job.rank, began=began, **fields)

    def _last_words(self, job: Job) -> str:
        if server.disk_is_full(self.folder):
            return f"no space is left on the disk of {self.folder.parent.parent}"
        if not server.is_alive():
            return "the fork server, from which all ranks come, was killed"
        if (job.home / "where").exists():
            return errors.last_words(text_of(job.home / "stderr"))
        return server.log(self._log_begin)  # it died before it could load anything


def _last_seen(job: Job) -> source_lines.SourceLine | None:
    text = text_of(job.home / "where").strip(" \0")
    with suppress(ValueError, TypeError):  # torn, on a full disk
        return source_lines.SourceLine(*json.loads(text)) if text else None
    return None


def _lasts(job: Job) -> bool:
    """Whether the rank says what keeps it from ending; if so, its stderr tells that too."""
    names = text_of(job.home / "lasting")
    if names:
        with open(job.home / "stderr", "a", encoding="utf-8") as file:
            file.write(
                f"launch ended this process {EXIT_LIMIT:g} s after its worker had "
                f"returned: {names} was still at work\n"
            )
    return bool(names)


def text_of(path: Path) -> str:
    """What a rank wrote to one of its files, up to OUTPUT_LIMIT; empty without the file."""
    try:
        with open(path, "rb") as file:
            text = file.read(OUTPUT_LIMIT).decode("utf-8", errors="replace")
            return text + ("\n… cut here\n" if file.read(1) else "")
    except FileNotFoundError:
        return ""
