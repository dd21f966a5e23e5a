"""The timeline: the same events on a wall clock, one track per rank."""

from collections.abc import Sequence

from mgpu_tutorial.lab.colours import tone
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
    start, last = min(event.begin for event in events), max(map(_end, events))
    rows = rows_in_flight(events)
    are_spans = {event.kind == "span" for event in events}
    most = 1 + max(rows.values(), default=0) if False in are_spans else 0
    track = _Track(0.3 if True in are_spans else 0, most)
    figure, axes = _canvas(report.world_size, track.inches)
    others = [events_of(like, during)] if like else []
    widths = [max(map(_end, es)) - min(e.begin for e in es) for es in (events, *others)]
    axes.set_xlim(0, max(widths) * 1e3 * 1.02)
    thinnest = 4 * (last - start)  # of what could not be seen: in milliseconds, 0.4 %
    for event in events:
        end = _end(event) if event.end else last
        begin, length = (event.begin - start) * 1e3, max((end - event.begin) * 1e3, thinnest)
        row = rows.get((event.rank, event.index), 0)
        _draw_bar(axes, event, begin, length, track, row)
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
        rows[event.rank, event.index] = row
    return rows


def _end(event: Event) -> float:
    return max(event.end or event.begin, event.done or event.begin)


class _Track:
    """A rank's part of the picture, in inches: spans above, rows of communication below."""

    def __init__(self, spans: float, rows: int) -> None:
        self.spans = spans
        self.row = max(0.36, min(0.17 * rows, 1.5)) / max(rows, 1)
        self.inches = 0.16 + spans + rows * self.row


def _canvas(ranks: int, inches: float):
    from matplotlib.figure import Figure  # a second to import: not for the ranks

    figure = Figure(figsize=(9, 0.7 + inches * ranks), layout="constrained")
    axes = figure.subplots()
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    for rank, tick in enumerate(axes.get_yticklabels()):
        tick.set(color=tone(rank).text, fontweight="bold", fontsize=12)
    axes.set_xlabel("milliseconds since the first event (measured on this machine)")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _draw_bar(
    axes, event: Event, begin: float, length: float, track: _Track, row: int
) -> None:
    is_span, fill = event.kind == "span", tone(event.rank).fill
    inches = track.spans if is_span else track.row
    above = 0.08 if is_span else 0.08 + track.spans + row * track.row
    top, height = event.rank - 0.5 + above / track.inches, inches / track.inches
    edge, alpha = (fill, 0.35) if is_span else ("white", 0.9)
    look = {"facecolor": fill, "alpha": alpha, "hatch": HATCHES[event.kind]}
    bar = [(begin, length)]
    axes.broken_barh(bar, (top, height), edgecolor=edge, linewidth=0.7, **look)
    text = bytes_text(event.nbytes) if event.done and event.nbytes else event.note or event.op
    text = what_fits(text, length / axes.get_xlim()[1], is_span)
    if text and inches >= 0.16:  # nine points are an eighth of an inch
        place = {"textcoords": "offset points", "va": "center_baseline"}
        box = None if is_span else {"facecolor": "white", "lw": 0, "pad": 1}
        style = {"fontsize": 9, "color": INK, "bbox": box}
        axes.annotate(text, (begin, top + height / 2), (4, 0), **place, **style)


def what_fits(text: str, share: float, is_span: bool) -> str:
    """The whole text in a bar over this share of the width; else a span's first word, or "".

    So a span "1 scatter" still shows its number where it is short.
    """
    if share >= 0.02 + 0.009 * len(text):
        return text
    first = text.split()[0]
    return first if is_span and share >= 0.003 + 0.009 * len(first) else ""
