"""The timeline: the same events on a wall clock, one track per rank."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

from mgpu_tutorial.lab.colours import NAMELESS, tone
from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.lab.words import bytes_text

HATCHES = ("//", "\\\\", "xx", "++")  # of the collectives, in the order of their first calls


def timeline(report: Report, like: Report | None = None, during: str | None = None) -> Plot:
    """Draw when each rank did what, in milliseconds since the first event.

    Communication is a full bar, a hatch for each collective, and a `span` a pale one above
    it. A collective that was started asynchronously is drawn until it is complete, and the
    frame of a message until `wait` has returned, in rows of their own where several are on
    the way at once. All bars of an operation have a name, or none. With `during`, only what
    began inside the span of that name is drawn. With `like`, the time axis is that of the
    other report's timeline where that one is longer. Raises ValueError where nothing was
    recorded.
    """
    events = _with_messages_on_their_way(events_of(report, during))
    start, last = min(event.begin for event in events), max(map(_end, events))
    rows = rows_in_flight(events)
    are_spans = {event.kind == "span" for event in events}
    most = 1 + max(rows.values(), default=0) if False in are_spans else 0
    track = _Track(0.3 if True in are_spans else 0, most)
    figure, axes = _canvas(report.world_size, track.inches)
    hatches = _legend(figure, events)
    others = [events_of(like, during)] if like else []
    widths = [max(map(_end, es)) - min(e.begin for e in es) for es in (events, *others)]
    axes.set_xlim(0, max(widths) * 1e3 * 1.02)
    thinnest = 4 * (last - start)  # of what could not be seen: in milliseconds, 0.4 %
    bars = [
        (e, max(1e3 * ((_end(e) if e.end else last) - e.begin), thinnest)) for e in events
    ]
    shares = [(e, length / axes.get_xlim()[1]) for e, length in bars]
    crowded = {e.op for e, share in shares if e.kind != "span" and not _fits(_name(e), share)}
    for event, length in bars:
        row = rows.get((event.rank, event.index), 0)
        bar = (event.begin - start) * 1e3, length
        _draw_bar(axes, event, bar, track, row, hatches.get(event.op, ""))
        if event.op not in crowded:
            _write_name(axes, event, bar, track, row)
    shown = ", ".join(dict.fromkeys(e.note or e.op for e in events))
    counts = f"{report.world_size} ranks, {len(events)} intervals"
    return Plot(figure, f"timeline of {counts}: {shown}")


def _with_messages_on_their_way(events: Sequence[Event]) -> list[Event]:
    """A message that was started lasts until its wait returns; the wait is left out."""
    waits = {(e.rank, e.of): e for e in events if e.kind == "wait" and e.end}
    started = {(e.rank, e.index) for e in events if e.op in ("isend", "irecv")} & waits.keys()
    return [
        replace(e, done=waits[e.rank, e.index].end) if (e.rank, e.index) in started else e
        for e in events
        if e.kind != "wait" or (e.rank, e.of) not in started
    ]


def _is_on_its_way(event: Event) -> bool:
    """True for a message: it may have arrived long before its wait returned."""
    return event.kind == "p2p" and event.done is not None


def _legend(figure, events: Sequence[Event]) -> dict[str, str]:
    """Name what is drawn, above it; returns the hatch of each operation."""
    from matplotlib.patches import Patch

    collectives = dict.fromkeys(e.op for e in events if e.kind == "collective")
    hatches = {"wait": ".."} | dict(zip(collectives, cycle(HATCHES), strict=False))
    grey, patches = NAMELESS.fill, []
    names = [e.note for e in events if e.kind == "span"]  # "0 block forward" is a block
    spans = dict.fromkeys(name.lstrip("0123456789 ").split()[0] for name in names)
    if spans:
        patches.append(Patch(facecolor=grey, alpha=0.35, label=", ".join(spans)))
    alike: dict[tuple[str, bool], list[str]] = {}  # operations that look alike
    for event in {e.op: e for e in reversed(events) if e.kind != "span"}.values():
        look = hatches.get(event.op, ""), _is_on_its_way(event)
        alike.setdefault(look, []).append(event.op)
    for (hatch, is_open), ops in alike.items():
        label = ", ".join(sorted(ops)) + is_open * " (until wait)"
        look = {"facecolor": "none", "edgecolor": grey} if is_open else {"facecolor": grey}
        patches.append(Patch(**{"edgecolor": "white", "hatch": hatch, "label": label} | look))
    style = {"ncols": 5, "frameon": False, "fontsize": 10, "handlelength": 2.4}
    figure.legend(handles=patches, loc="outside upper left", **style)
    return hatches


def rows_in_flight(events: Sequence[Event]) -> dict[tuple[int, int], int]:
    """The row of each call that is on its way in its rank's track, by (rank, index).

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

    def place(self, event: Event, row: int) -> tuple[float, float]:
        """Where a bar begins and how high it is, in tracks from the top."""
        is_span = event.kind == "span"
        above = 0.08 if is_span else 0.08 + self.spans + row * self.row
        high = self.spans if is_span else self.row
        return event.rank - 0.5 + above / self.inches, high / self.inches


def _canvas(ranks: int, inches: float):
    from matplotlib.figure import Figure  # a second to import: not for the ranks

    figure = Figure(figsize=(9, 1 + inches * ranks), layout="constrained")
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
    axes, event: Event, bar: tuple[float, float], track: _Track, row: int, hatch: str
) -> None:
    fill = tone(event.rank).fill
    look = {"facecolor": fill, "edgecolor": "white", "alpha": 0.9, "linewidth": 0.7}
    if event.kind == "span":
        look |= {"edgecolor": fill, "alpha": 0.35}
    elif _is_on_its_way(event):
        look |= {"facecolor": "none", "edgecolor": fill, "linewidth": 1.5}
    axes.broken_barh([bar], track.place(event, row), hatch=hatch, **look)


def _name(event: Event) -> str:
    of_bytes = event.done is not None and event.nbytes
    return bytes_text(event.nbytes) if of_bytes else event.note or event.op


def _fits(text: str, share: float, margin: float = 0.02) -> bool:
    return share >= margin + 0.009 * len(text)


def _write_name(
    axes, event: Event, bar: tuple[float, float], track: _Track, row: int
) -> None:
    """The name of a bar at its left end; of a span that is too short for it the first word.

    So a span "1 scatter" still shows its number.
    """
    is_span, share, text = event.kind == "span", bar[1] / axes.get_xlim()[1], _name(event)
    if is_span and not _fits(text, share):
        text = text.split()[0]
        text = text if _fits(text, share, 0.003) else ""
    top, height = track.place(event, row)
    if text and height * track.inches >= 0.16:  # nine points are an eighth of an inch
        place = {"textcoords": "offset points", "va": "center_baseline"}
        box = None if is_span else {"facecolor": "white", "lw": 0, "pad": 1}
        style = {"fontsize": 9, "color": INK, "bbox": box}
        axes.annotate(text, (bar[0], top + height / 2), (4, 0), **place, **style)
