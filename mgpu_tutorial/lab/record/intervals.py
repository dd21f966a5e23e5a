"""The intervals of a run: all of its events, or those inside a span."""

from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event


def events_of(report: Report, during: str | None = None) -> list[Event]:
    """The calls, waits and spans of a run, or those that began inside the span `during`.

    Notes are left out, and waits for asynchronous calls whose completion is known: these
    calls last until then. Raises ValueError where nothing was recorded.
    """
    completed = {(event.rank, event.index) for event in report.events if event.done}
    spans = {e.rank: e for e in report.events if e.kind == "span" and e.note == during}

    def is_inside(event: Event) -> bool:
        span = spans.get(event.rank)
        if span is None or event.index <= span.index:
            return False
        return span.end is None or event.begin <= span.end

    events = [
        event
        for event in report.events
        if event.kind != "note" and (event.rank, event.of) not in completed
    ]
    if during is not None:
        events = [event for event in events if is_inside(event)]
    if not events:
        place = f" inside a span {during!r}" if during else ""
        raise ValueError(f"nothing was recorded{place}: launch with trace=True")
    return events
