"""Start the ranks, watch over them, and leave nothing behind.

The processes are those of torchrun's engine, torch.distributed.elastic, forked
from a server that has torch imported already. Elastic stops every rank the moment
one exits with an error, before the others can say where they are; so a rank that
raises notes it in a file (see rank.py) and this module gives its peers a moment.
"""

import json
import logging
import multiprocessing as mp
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from types import FrameType

from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    start_processes,
)

from mgpu_tutorial.lab.record import source_lines
from mgpu_tutorial.lab.run import errors, server
from mgpu_tutorial.lab.run.errors import Fate
from mgpu_tutorial.lab.run.progress_bar import Meter
from mgpu_tutorial.lab.run.rank import Job, enter

START_LIMIT = 120.0  # seconds until all ranks must have joined: imports on a busy machine
GRACE = 1.0  # seconds that the others get to end after the first failure
EXIT_LIMIT = 2.0  # seconds from the last worker's end to the last process's
TICK = 0.004
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class Interrupts:
    """Ctrl-C during a launch: it raises inside `allowed()`, and waits everywhere else.

    Python raises KeyboardInterrupt between any two instructions, so also after the ranks
    have started and before anybody has a name for them, or while they are being stopped.
    Nobody would end these ranks. Further Ctrl-C while the first is being obeyed are one
    with it.
    """

    def __enter__(self) -> "Interrupts":
        self._allowed, self._waiting, self._handler = False, False, None
        handler = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._handler = handler
            signal.signal(signal.SIGINT, self._arrive)
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._handler:
            signal.signal(signal.SIGINT, self._handler)
            if self._waiting and kind is not KeyboardInterrupt:
                self._handler(signal.SIGINT, None)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Here Ctrl-C may raise, because the caller stops the ranks."""
        try:
            self._allowed = True
            if self._waiting:
                self._arrive(signal.SIGINT, None)
            yield
        finally:
            self._allowed = False

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        if self._allowed:
            self._allowed = self._waiting = False
            self._handler(number, frame)
            self._allowed = True  # a handler of the user's own may return
        else:
            self._waiting = True


@contextmanager
def workspace(world_size: int) -> Iterator[Path]:
    """A folder for one launch, inside the kernel's own temporary folder, then gone."""
    folder = Path(mkdtemp(prefix="launch-", dir=server.temporary_folder()))
    try:
        for rank in range(world_size):
            (folder / f"rank{rank}").mkdir()
        yield folder
    finally:
        end = time.monotonic() + 5
        while folder.exists() and time.monotonic() < end:
            shutil.rmtree(folder, ignore_errors=True)


def await_server() -> None:
    """The first process takes as long as the imports; let Ctrl-C reach this wait."""
    server.start()
    marker = Path(server.temporary_folder(), "warm")
    if server.METHOD == "forkserver" and not marker.exists():
        if server.notebook_kernel() and server.importing():
            import_meanwhile()
        first = mp.get_context(server.METHOD).Process(target=time.sleep, args=(0,))
        first.start()
        first.join()
        marker.touch()


def import_meanwhile() -> None:
    """Import what the next cells need and what takes long: for drawings, for comparisons."""
    import matplotlib.figure  # noqa: F401
    import sympy  # noqa: F401  torch.testing.assert_close needs it


class Ranks:
    """The processes of one launch."""

    def __init__(self, jobs: list[Job], environments: list[dict[str, str]]) -> None:
        self.jobs = jobs
        self.folder = Path(jobs[0].folder)
        # Elastic takes over the signal handlers when it starts in the main thread.
        # So it starts in another.
        with _quiet_elastic(), ThreadPoolExecutor(1) as pool:
            self._context: PContext = pool.submit(
                start_processes,
                name="mgpu",
                entrypoint=enter,
                args={job.rank: (job,) for job in jobs},
                envs=dict(enumerate(environments)),
                logs_specs=DefaultLogsSpecs(log_dir=str(self.folder / "elastic")),
                start_method=server.METHOD,
            ).result()

    def watch(self, timeout: float) -> tuple[str, float, float]:
        """Wait until all is over: ("ended" | "failed" | "hung" | "late", begin, end).

        The timeout counts from the moment at which all ranks had joined.
        """
        started = time.monotonic()
        begin: float | None = None
        failed: float | None = None
        with _quiet_elastic(), Meter(self.folder, len(self.jobs), timeout) as meter:
            while True:
                now = time.monotonic()
                outcomes = self._outcomes()
                died = [p for p in self._processes() if p.exitcode not in (None, 0)]
                bad = bool(died) or any(o["kind"] != "returned" for o in outcomes.values())
                if bad and failed is None:
                    failed = now
                if begin is None and all((job.home / "ready").exists() for job in self.jobs):
                    begin = now
                if self._all_over(outcomes) or (failed is not None and now > failed + GRACE):
                    # On the way without failure elastic collects its processes itself.
                    if bad or self._context.wait(EXIT_LIMIT, period=TICK) is None:
                        return "failed" if bad else "ended", begin or started, now
                    return "ended", begin or started, now
                if begin is None and now > started + START_LIMIT:
                    return "late", started, now
                if begin is not None and now > begin + timeout:
                    return "hung", begin, now
                meter.show(now - (begin or started))
                time.sleep(TICK)

    def _all_over(self, outcomes: dict[int, dict]) -> bool:
        """True when every rank has said how it ended, or cannot say it any more."""
        return all(
            job.rank in outcomes or process.exitcode not in (None, 0)
            for job, process in zip(self.jobs, self._processes(), strict=True)
        )

    def fates(self) -> list[Fate]:
        """How every rank ended, or where it is; asks the living for their stack."""
        living = [
            job
            for job, process in zip(self.jobs, self._processes(), strict=True)
            if process.is_alive()
        ]
        outcomes = self._outcomes()
        asked = [job for job in living if job.rank not in outcomes]
        self._ask_for_stacks(asked)
        return [self._fate(job, outcomes, job in asked) for job in self.jobs]

    def stop(self) -> None:
        """Kill whatever still runs, with its children."""
        for process in self._processes():
            if process.is_alive():
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
                with suppress(ProcessLookupError, PermissionError, AttributeError):
                    os.killpg(process.pid, signal.SIGKILL)
        with _quiet_elastic():
            self._context.close(signal.SIGKILL, timeout=5)

    def _processes(self) -> list:
        return self._context._pc.processes if self._context._pc else []

    def _outcomes(self) -> dict[int, dict]:
        found = {}
        for job in self.jobs:
            with suppress(FileNotFoundError):
                found[job.rank] = json.loads(
                    (job.home / "outcome").read_text(encoding="utf-8")
                )
        return found

    def _ask_for_stacks(self, jobs: list[Job]) -> None:
        if not hasattr(signal, "SIGUSR1"):
            return
        for job in jobs:
            (job.home / "stack").write_text("")
            with suppress(ProcessLookupError):
                os.kill(self._processes()[job.rank].pid, signal.SIGUSR1)
        end = time.monotonic() + 0.5
        while time.monotonic() < end and not all(
            source_lines.of_dump(text_of(job.home / "stack")) for job in jobs
        ):
            time.sleep(TICK)

    def _fate(self, job: Job, outcomes: dict[int, dict], alive: bool) -> Fate:
        exitcode = self._processes()[job.rank].exitcode
        dumped = source_lines.of_dump(text_of(job.home / "stack"))
        if job.rank in outcomes:
            fields = {**outcomes[job.rank]}
            fields["where"] = (
                source_lines.Place(*fields["where"]) if fields.get("where") else None
            )
            return Fate(rank=job.rank, **fields)
        if alive:
            return Fate(job.rank, "stopped", dumped or _last_seen(job))
        words = errors.last_words(text_of(job.home / "stderr"))
        if not (job.home / "where").exists():  # it died before it could load anything
            log = text_of(Path(server.temporary_folder(), server.LOG)).strip()
            words = log.splitlines()[-1] if log else ""
        return Fate(
            job.rank, "died", dumped or _last_seen(job), exitcode=exitcode, last_words=words
        )


def _last_seen(job: Job) -> source_lines.Place | None:
    text = text_of(job.home / "where").strip(" \0")
    return source_lines.Place(*json.loads(text)) if text else None


def text_of(path: Path) -> str:
    """What a rank wrote to one of its files; empty where it wrote none."""
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Elastic logs a page at every failure; the launcher's own error says it in a line."""
    names = ("torch.distributed.elastic.multiprocessing.api", "torch.multiprocessing.spawn")
    loggers = [logging.getLogger(name) for name in names]
    drop = _Drop()
    for logger in loggers:
        logger.addFilter(drop)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(drop)


class _Drop(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return False
