"""The intervals of a run: all of its events, or those inside a span."""

from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event


def events_of(report: Report, during: str | None = None) -> list[Event]:
    """The intervals of a run, or those that began inside the span `during`.

    Notes are none, and a wait is left out where the call that it waits for is there until it
    is complete. Raises ValueError where nothing was recorded.
    """
    flights = {(event.rank, event.index) for event in report.events if event.done}
    events = [
        event
        for event in report.events
        if event.kind != "note" and (event.rank, event.of) not in flights
    ]
    if during is not None:
        inside = {e.rank: e for e in events if e.kind == "span" and e.note == during}
        events = [
            event
            for event in events
            if event.rank in inside
            and inside[event.rank].index < event.index
            and event.begin <= (inside[event.rank].end or event.begin)
        ]
    if not events:
        place = f" inside a span {during!r}" if during else ""
        raise ValueError(f"nothing was recorded{place}: launch with trace=True")
    return events
