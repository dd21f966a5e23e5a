"""The timeline: the same events on a wall clock, one lane a rank (or a thread)."""

from typing import NamedTuple

from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.draw.sequence_chart import bytes_text
from mgpu_tutorial.lab.record.report import Report, colour_of
from mgpu_tutorial.lab.record.trace import Event

HATCHES = {"p2p": "", "collective": "//", "wait": "..", "span": ""}


def timeline(report: Report, like: Report | None = None, during: str | None = None) -> Plot:
    """Draw when each rank (or thread) did what, in milliseconds since the first event.

    Communication is a full bar (hatched for a collective, dotted for a wait) and a
    `span` a pale one above it. A collective that was started asynchronously is drawn
    until it is complete, in rows of its own where several are on the way at once. With
    `during`, only what began inside the span of that name is drawn. With `like`, the time
    axis is that of the other report's timeline where that one is longer. Raises ValueError
    where nothing was recorded.
    """
    events = events_of(report, during)
    start = min(event.begin for event in events)
    last = max(map(_end, events))
    rows, layout = _layout(events)
    lanes = [report.lane(rank) for rank in range(report.world_size)]
    figure, axes = _canvas(lanes, layout.lane)
    axes.set_xlim(0, max(_length(r, during) for r in (report, like) if r) * 1e3 * 1.02)
    for event in events:
        begin = (event.begin - start) * 1e3
        length = ((_end(event) if event.end else last) - event.begin) * 1e3
        place = layout.place(event, rows.get(_key(event), 0))
        tone = colour_of(lanes[event.rank])
        _bar(axes, event, tone, begin, max(length, last - start), place, layout.lane)
    names = ", ".join(dict.fromkeys(e.note or e.op for e in events))
    counts = f"{len(events)} intervals"
    what = "threads" if report.lanes else "ranks"
    return Plot(figure, f"timeline of {report.world_size} {what}, {counts}: {names}")


def events_of(report: Report, during: str | None = None) -> list[Event]:
    """What a timeline shows: no notes, and no wait for what is drawn until it is complete."""
    flights = {_key(event) for event in report.events if event.done}
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
        where = f" inside a span {during!r}" if during else ""
        raise ValueError(f"nothing was recorded{where}: launch with trace=True")
    return events


def _key(event: Event) -> tuple[int, int]:
    return event.rank, event.index


def _end(event: Event) -> float:
    return max(event.end or event.begin, event.done or event.begin)


def _length(report: Report, during: str | None) -> float:
    events = events_of(report, during)
    return max(map(_end, events)) - min(event.begin for event in events)


class _Layout(NamedTuple):
    """Inches of a lane: a bar for spans above, `rows` of communication as high as `row`."""

    spans: float
    rows: int
    row: float

    @property
    def lane(self) -> float:
        return 0.16 + self.spans + self.rows * self.row

    def place(self, event: Event, row: int) -> tuple[float, float]:
        """Top and height of a bar, where a lane is one high."""
        top, height = 0.08, self.spans
        if event.kind != "span":
            top, height = top + self.spans + row * self.row, self.row
        return event.rank - 0.5 + top / self.lane, height / self.lane


def _layout(events: list[Event]) -> tuple[dict[tuple[int, int], int], _Layout]:
    """The row of each collective on its way, and the lane that has room for all of them."""
    rows: dict[tuple[int, int], int] = {}
    until: dict[int, list[float]] = {}
    for event in (event for event in events if event.done):
        ends = until.setdefault(event.rank, [])
        free = next((i for i, end in enumerate(ends) if end <= event.begin), len(ends))
        ends[free : free + 1] = [event.done]
        rows[_key(event)] = free
    kinds = {event.kind == "span" for event in events}
    most = max([*map(len, until.values()), int(False in kinds)])
    row = max(0.36, min(0.15 * most, 1.3)) / max(most, 1)
    return rows, _Layout(0.3 if True in kinds else 0, most, row)


def _canvas(lanes: list[str], lane_height: float):
    from matplotlib.figure import Figure  # a second to import: not for the ranks

    figure = Figure(figsize=(9, 0.7 + lane_height * len(lanes)), layout="constrained")
    axes = figure.subplots()
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_yticks(range(len(lanes)), lanes)
    for name, tick in zip(lanes, axes.get_yticklabels(), strict=True):
        tick.set(color=colour_of(name), fontweight="bold", fontsize=12)
    axes.set_xlabel("milliseconds since the first event (measured on this machine)")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _bar(
    axes, event: Event, tone: str, begin: float, length: float, place, lane_height: float
) -> None:
    is_span = event.kind == "span"
    y, height = place
    inches = height * lane_height
    axes.broken_barh(
        [(begin, length)],
        (y, height),
        facecolor=tone,
        alpha=0.35 if is_span else 0.9,
        hatch=HATCHES[event.kind],
        edgecolor="white" if not is_span else tone,
    )
    text = bytes_text(event.nbytes) if event.done else event.note or event.op
    share = length / axes.get_xlim()[1]
    if share < 0.02 + 0.009 * len(text) or inches < 0.14:
        # too narrow for words: a number perhaps, as in "1 scatter"
        text = text.split()[0] if text[0].isdigit() and share > 0.012 and is_span else ""
    if not text:
        return
    axes.text(
        begin,
        y + height / 2,
        f" {text}",
        va="center",
        fontsize=9 if inches > 0.2 else 7.5,
        clip_on=True,
        color="black" if is_span else "white",
        bbox=None if is_span else {"facecolor": tone, "lw": 0, "pad": 0.3},
    )
