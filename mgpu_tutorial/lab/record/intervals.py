"""The intervals of a run: all of its events, or those inside a span."""

from dataclasses import replace

from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event


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
        raise ValueError(f"nothing was recorded{place}: launch with trace=True")
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
