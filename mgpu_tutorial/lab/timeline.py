"""The timeline: the same events on a wall clock, one lane a rank (or a thread)."""

from mgpu_tutorial.lab.chart import size
from mgpu_tutorial.lab.plot import Plot
from mgpu_tutorial.lab.report import Report, colour_of
from mgpu_tutorial.lab.trace import Event

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
    rows = _rows([event for event in events if event.done])
    lanes = [report.lane(rank) for rank in range(report.world_size)]
    flat = all(event.kind == "span" for event in events)  # no room for communication
    most = max([n for _, n in rows.values()], default=1)
    figure, axes = _canvas(lanes, 0.5 if flat else 0.75 + 0.12 * (min(most, 8) - 1))
    axes.set_xlim(0, max(_length(r, during) for r in (report, like) if r) * 1e3 * 1.02)
    for event in events:
        begin = (event.begin - start) * 1e3
        length = ((_end(event) if event.end else last) - event.begin) * 1e3
        place = (event.rank - 0.3, 0.6) if flat else _place(event, rows)
        tone = colour_of(lanes[event.rank])
        _bar(axes, event, tone, begin, max(length, last - start), place)
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


def _rows(flights: list[Event]) -> dict[tuple[int, int], tuple[int, int]]:
    """For each flight its row among those of its rank, and how many rows there are."""
    rows: dict[tuple[int, int], int] = {}
    until: dict[int, list[float]] = {}
    for event in flights:
        ends = until.setdefault(event.rank, [])
        free = next((i for i, end in enumerate(ends) if end <= event.begin), len(ends))
        ends[free : free + 1] = [event.done]
        rows[_key(event)] = free
    return {key: (row, len(until[key[0]])) for key, row in rows.items()}


def _place(event: Event, rows: dict[tuple[int, int], tuple[int, int]]) -> tuple[float, float]:
    """Top and height of a bar: spans above, communication below, in rows if it overlaps."""
    if event.kind == "span":
        return event.rank - 0.42, 0.3
    row, count = rows.get(_key(event), (0, 1))
    return event.rank - 0.1 + 0.44 * row / count, 0.44 / count


def _canvas(lanes: list[str], lane_height: float):
    from matplotlib.figure import Figure  # a second to import: not for the ranks

    figure = Figure(figsize=(9, 0.9 + lane_height * len(lanes)), layout="constrained")
    axes = figure.subplots()
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_yticks(range(len(lanes)), lanes)
    for name, tick in zip(lanes, axes.get_yticklabels(), strict=True):
        tick.set(color=colour_of(name), fontweight="bold", fontsize=12)
    axes.set_xlabel("milliseconds since the first event (measured on this machine)")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _bar(axes, event: Event, tone: str, begin: float, length: float, place) -> None:
    is_span = event.kind == "span"
    y, height = place
    axes.broken_barh(
        [(begin, length)],
        (y, height),
        facecolor=tone,
        alpha=0.35 if is_span else 0.9,
        hatch=HATCHES[event.kind],
        edgecolor="white" if not is_span else tone,
    )
    text = size(event.nbytes) if event.done else event.note or event.op
    share = length / axes.get_xlim()[1]
    if share < 0.02 + 0.009 * len(text) or height < 0.1:
        # too narrow for words: a number perhaps, as in "1 scatter"
        text = text.split()[0] if text[0].isdigit() and share > 0.012 and is_span else ""
    if not text:
        return
    axes.text(
        begin,
        y + height / 2,
        f" {text}",
        va="center",
        fontsize=9 if height > 0.15 else 7.5,
        clip_on=True,
        color="black" if is_span else "white",
        bbox=None if is_span else {"facecolor": tone, "lw": 0, "pad": 0.3},
    )
