"""The timeline: the same events on a wall clock, one track per rank."""

from collections.abc import Sequence

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
    kinds = {event.kind == "span" for event in events}
    most = max([*(row + 1 for row in rows.values()), int(False in kinds)])
    track = _Track(0.3 if True in kinds else 0, most)
    names = [f"rank {rank}" for rank in range(report.world_size)]
    figure, axes = _canvas(names, track.inches)
    axes.set_xlim(0, max(_length(r, during) for r in (report, like) if r) * 1e3 * 1.02)
    thinnest = 4 * (last - start)  # of what could not be seen: in milliseconds, 0.4 %
    for event in events:
        end = _end(event) if event.end else last
        begin, length = (event.begin - start) * 1e3, max((end - event.begin) * 1e3, thinnest)
        _draw_bar(axes, event, begin, length, track, rows.get(_key(event), 0))
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


class _Track:
    """A rank's part of the picture, in inches: spans above, rows of communication below."""

    def __init__(self, spans: float, rows: int) -> None:
        self.spans = spans
        self.row = max(0.36, min(0.17 * rows, 1.5)) / max(rows, 1)
        self.inches = 0.16 + spans + rows * self.row


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


def _draw_bar(
    axes, event: Event, begin: float, length: float, track: _Track, row: int
) -> None:
    is_span, tone = event.kind == "span", tone_of(f"rank {event.rank}").fill
    inches = track.spans if is_span else track.row
    above = 0.08 if is_span else 0.08 + track.spans + row * track.row
    top, height = event.rank - 0.5 + above / track.inches, inches / track.inches
    axes.broken_barh(
        [(begin, length)],
        (top, height),
        facecolor=tone,
        alpha=0.35 if is_span else 0.9,
        hatch=HATCHES[event.kind],
        edgecolor="white" if not is_span else tone,
        linewidth=0.7,
    )
    text = bytes_text(event.nbytes) if event.done and event.nbytes else event.note or event.op
    text = what_fits(text, length / axes.get_xlim()[1], is_span)
    if text and inches >= 0.16:  # nine points are an eighth of an inch
        axes.annotate(
            text,
            (begin, top + height / 2),
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
