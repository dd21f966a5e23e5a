"""Record the spans of this process's own threads: a track per thread, not per rank."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mgpu_tutorial.lab.record import trace
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event

MAIN = "main"


class ThreadRecorder:
    """Notes when each span begins and ends, and which thread it is in.

    `events` are (name of the thread, fields of an `Event`), in the order of their beginning.
    """

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._lock = threading.Lock()

    def begin(self, op: str, **details: Any) -> int:
        """Note that this thread begins `op`; returns the number that `end` wants."""
        thread = threading.current_thread()
        name = MAIN if thread is threading.main_thread() else thread.name
        with self._lock:
            self.events.append((name, {"op": op, "begin": time.monotonic(), **details}))
            return len(self.events) - 1

    def end(self, index: int, **details: Any) -> None:
        """Note that event `index` is over."""
        _, fields = self.events[index]
        fields.update(end=time.monotonic(), **details)

    def fill(self, report: Report, origin: float) -> None:
        """Write what was recorded into `report`: the main thread first, then by name.

        A thread stands where a report of ranks has a rank; times are seconds since `origin`.
        """
        names = {name for name, _ in self.events}
        tracks = sorted(names, key=lambda name: (name != MAIN, name))
        report.tracks, report.world_size = tracks, len(tracks)
        report.stdout = report.stderr = [""] * report.world_size
        for index, (name, fields) in enumerate(self.events):
            times = {k: fields.pop(k) - origin for k in ("begin", "end") if k in fields}
            event = Event(rank=tracks.index(name), index=index, **times, **fields)
            report.events.append(event)


@contextmanager
def record_threads() -> Iterator[Report]:
    """Record every `span` in this process, whichever thread it is in, for `timeline`.

    The report is complete when the block ends; its tracks bear the threads' names. Raises
    RuntimeError inside a rank or another such block: there the spans belong elsewhere.
    """
    if trace.current() is not None:
        raise RuntimeError(
            "these spans are recorded already: by launch, or by a block around"
        )
    recorder, report, origin = ThreadRecorder(), Report(0), time.monotonic()
    trace.span.recorder = recorder
    try:
        yield report
    finally:
        trace.span.recorder = None
        recorder.fill(report, origin)
        report.seconds = time.monotonic() - origin
