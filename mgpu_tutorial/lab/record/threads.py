"""Record the spans of this process's own threads: a lane a thread, not a lane a rank."""

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
    """Notes when each span begins and ends, and which thread it is in."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._lock = threading.Lock()

    def begin(self, op: str, **details: Any) -> int:
        thread = threading.current_thread()
        lane = MAIN if thread is threading.main_thread() else thread.name
        with self._lock:
            self.events.append((lane, {"op": op, "begin": time.monotonic(), **details}))
            return len(self.events) - 1

    def end(self, index: int, **details: Any) -> None:
        self.events[index][1].update(end=time.monotonic(), **details)

    def fill(self, report: Report, origin: float) -> None:
        """Write what was recorded into `report`: the main thread first, then by name."""
        lanes = {lane for lane, _ in self.events}
        report.lanes = sorted(lanes, key=lambda lane: (lane != MAIN, lane))
        report.world_size = len(report.lanes)
        report.stdout = report.stderr = [""] * report.world_size
        for index, (lane, fields) in enumerate(self.events):
            times = {k: fields.pop(k) - origin for k in ("begin", "end") if k in fields}
            rank = report.lanes.index(lane)
            report.events.append(Event(rank=rank, index=index, **times, **fields))


@contextmanager
def record_threads() -> Iterator[Report]:
    """Record every `span` in this process, whichever thread it is in, for `timeline`.

    The report is complete when the block ends; its lanes bear the threads' names. Raises
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
