"""What is read from the events of a run: intervals, bytes, messages."""

from collections import Counter
from dataclasses import replace

from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.lab.table import Table


def events_of(report: Report, during: str | None = None) -> list[Event]:
    """The calls, waits and spans of a run, or those that began inside the span `during`.

    Notes are left out, and waits for asynchronous calls whose completion is known: these
    calls last until then. Raises ValueError where nothing was recorded.
    """
    completed = {(event.rank, event.index) for event in report.events if event.done}
    spans = {e.rank: e for e in report.events if e.kind == "span" and e.note == during}
    events = [
        event
        for event in report.events
        if event.kind not in ("note", "frame")
        and (event.rank, event.of) not in completed
        and (during is None or _is_inside(event, spans.get(event.rank)))
    ]
    if not events:
        place = f" inside a span {during!r}" if during else ""
        advice = "" if report.events else ": launch with trace=True"
        raise ValueError(f"nothing was recorded{place}{advice}")
    return events


def _is_inside(event: Event, span: Event | None) -> bool:
    if span is None or event is span or event.begin < span.begin:
        return False
    return span.end is None or event.begin <= span.end


def milliseconds(report: Report, name: str) -> float:
    """The length of the span of that name on the slowest rank."""
    spans = [e for e in report.events if e.kind == "span" and e.note == name]
    return 1e3 * max(span.end - span.begin for span in spans)


def shortest_step(report: Report) -> Report:
    """The same run; its shortest step, of all but the first two, is called "shortest"."""
    notes = dict.fromkeys(e.note for e in report.events if e.kind == "span")
    steps = [note for note in notes if note.startswith("step ")]
    least = min(steps[2:], key=lambda step: milliseconds(report, step))
    events = [replace(e, note="shortest") if e.note == least else e for e in report.events]
    return replace(report, events=events)


def payload(report: Report, name: str) -> int:
    """The bytes that rank 0 handed to collectives inside its span `name`."""
    mine = [event for event in report.events if event.rank == 0]
    (span,) = [e for e in mine if e.kind == "span" and e.note == name]
    return sum(e.nbytes for e in mine if e.kind == "collective" and _is_inside(e, span))


def traffic(report: Report, expected: float | None = None, formula: str = "formula") -> Table:
    """Count each rank's calls, its messages and their bytes: a row a rank.

    With `expected` bytes a rank, after `formula`, also the ratio of the two. Only what passes
    through send and isend is seen here, not what a collective moves inside the library.
    """
    if not report.events:
        raise ValueError("nothing was recorded: launch with trace=True")
    rows = []
    for rank in range(report.world_size):
        mine = [e for e in report.events if e.rank == rank]
        calls = [e.op for e in mine if e.kind in ("p2p", "collective")]
        named = ", ".join(f"{calls.count(op)} {op}" for op in dict.fromkeys(calls))
        sent = [e.nbytes for e in mine if e.sends]
        ratio = [int(expected), f"{sum(sent) / expected:.3f}"] if expected else []
        rows.append([f"rank {rank}", named, len(sent), sum(sent), *ratio])
    header = ["", "calls", "messages sent", "bytes sent"]
    return Table(header + ([formula, "sent / formula"] if expected else []), rows)


# An all_reduce is a reduce_scatter and then an all_gather, so its tensor passes twice.
PASSES = {"all_reduce": 2, "reduce": 1, "broadcast": 1}
PASSES |= {"reduce_scatter_single": 1, "all_gather_single": 1}


def ring_passes(report: Report, during: str) -> Counter[str]:
    """The bytes of which a rank sends (N - 1) / N by a ring, in rank 0's span `during`."""
    passed: Counter[str] = Counter()
    for event in events_of(report, during):
        if event.rank == 0 and event.op in PASSES and len(event.group) > 1:
            # the recorder notes the smaller side of a reduce_scatter, the output
            sides = len(event.group) if event.op == "reduce_scatter_single" else 1
            passed[event.op] += PASSES[event.op] * sides * event.nbytes
    return passed
