"""The timeline: the same events on a wall clock, one track per rank."""

from collections.abc import Sequence
from typing import NamedTuple

from mgpu_tutorial.lab.colours import tone_of
from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.lab.words import bytes_text

HATCHES = {"p2p": "", "collective": "//", "wait": "..", "span": ""}


def timeline(report: Report, like: Report | None = None, during: str | None = None) -> Plot:
    """Draw when each rank did what, in milliseconds since the first event.

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
    rows = rows_in_flight(events)
    track = _track(events, rows)
    names = [f"rank {rank}" for rank in range(report.world_size)]
    figure, axes = _canvas(names, track.inches)
    axes.set_xlim(0, max(_length(r, during) for r in (report, like) if r) * 1e3 * 1.02)
    for event in events:
        end = _end(event) if event.end else last
        bar = _Bar(
            begin=(event.begin - start) * 1e3,
            length=max(
                (end - event.begin) * 1e3, 4 * (last - start)
            ),  # never too thin to see
            top=event.rank - 0.5 + track.top(event, rows.get(_key(event), 0)),
            height=track.height(event),
        )
        _draw_bar(axes, bar, event, tone_of(names[event.rank]).fill, track.inches)
    shown = ", ".join(dict.fromkeys(e.note or e.op for e in events))
    counts = f"{report.world_size} ranks, {len(events)} intervals"
    return Plot(figure, f"timeline of {counts}: {shown}")


def rows_in_flight(events: Sequence[Event]) -> dict[tuple[int, int], int]:
    """The row of each asynchronous collective in its rank's track, by (rank, index).

    It is the first row where nothing else of that rank is still on the way.
    """
    rows: dict[tuple[int, int], int] = {}
    free_from: dict[int, list[float]] = {}  # by rank: when each of its rows is free again
    for event in (event for event in events if event.done):
        ends = free_from.setdefault(event.rank, [])
        row = next((i for i, end in enumerate(ends) if end <= event.begin), len(ends))
        ends[row : row + 1] = [event.done]
        rows[_key(event)] = row
    return rows


def _key(event: Event) -> tuple[int, int]:
    return event.rank, event.index


def _end(event: Event) -> float:
    return max(event.end or event.begin, event.done or event.begin)


def _length(report: Report, during: str | None) -> float:
    events = events_of(report, during)
    return max(map(_end, events)) - min(event.begin for event in events)


class _Track(NamedTuple):
    """A rank's part of the picture, in inches: spans above, rows of communication below."""

    spans: float
    rows: int
    row: float

    @property
    def inches(self) -> float:
        return 0.16 + self.spans + self.rows * self.row

    def top(self, event: Event, row: int) -> float:
        """Where a bar begins, from 0 at the top of the track to 1 at its bottom."""
        above = 0.08 if event.kind == "span" else 0.08 + self.spans + row * self.row
        return above / self.inches

    def height(self, event: Event) -> float:
        """The height of a bar as a share of the track."""
        return (self.spans if event.kind == "span" else self.row) / self.inches


def _track(events: list[Event], rows: dict[tuple[int, int], int]) -> _Track:
    """A track that has room for all rows of the fullest rank."""
    kinds = {event.kind == "span" for event in events}
    most = max([*(row + 1 for row in rows.values()), int(False in kinds)])
    row = max(0.36, min(0.17 * most, 1.5)) / max(most, 1)
    return _Track(0.3 if True in kinds else 0, most, row)


def _canvas(names: list[str], inches: float):
    from matplotlib.figure import Figure  # a second to import: not for the ranks

    figure = Figure(figsize=(9, 0.7 + inches * len(names)), layout="constrained")
    axes = figure.subplots()
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names)
    for name, tick in zip(names, axes.get_yticklabels(), strict=True):
        tick.set(color=tone_of(name).text, fontweight="bold", fontsize=12)
    axes.set_xlabel("milliseconds since the first event (measured on this machine)")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


class _Bar(NamedTuple):
    """`begin` and `length` in milliseconds, `top` and `height` in tracks."""

    begin: float
    length: float
    top: float
    height: float


def _draw_bar(axes, bar: _Bar, event: Event, tone: str, track_inches: float) -> None:
    is_span = event.kind == "span"
    axes.broken_barh(
        [(bar.begin, bar.length)],
        (bar.top, bar.height),
        facecolor=tone,
        alpha=0.35 if is_span else 0.9,
        hatch=HATCHES[event.kind],
        edgecolor="white" if not is_span else tone,
        linewidth=0.7,
    )
    inches = bar.height * track_inches
    known = event.done and event.nbytes
    text = bytes_text(event.nbytes) if known else event.note or event.op
    text = what_fits(text, bar.length / axes.get_xlim()[1], is_span)
    if not text or inches < 0.16:  # nine points are an eighth of an inch
        return
    axes.annotate(
        text,
        (bar.begin, bar.top + bar.height / 2),
        (4, 0),
        textcoords="offset points",
        va="center_baseline",
        fontsize=9,
        color=INK,
        bbox=None if is_span else {"facecolor": "white", "lw": 0, "pad": 1},
    )


def what_fits(text: str, share: float, is_span: bool) -> str:
    """The whole text in a bar over this share of the width; else a span's first word, or "".

    So a span "1 scatter" still shows its number where it is short.
    """
    if share >= 0.02 + 0.009 * len(text):
        return text
    first = text.split()[0]
    return first if is_span and share >= 0.003 + 0.009 * len(first) else ""
