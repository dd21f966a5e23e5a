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

HATCHES = ("//", "||", "xx", "oo")  # of the collectives, in the order of their first calls


def timeline(report: Report, like: Report | None = None, during: str | None = None) -> Plot:
    """Draw when each rank did what, in milliseconds since the first event.

    Communication is a full bar, a hatch for each collective, and a `span` a pale one above
    it. An asynchronous collective is drawn until it is complete, and the frame of a message
    until `wait` has returned, in rows of their own where several are on the way at once.
    With `during`, only what began inside the span of that name is drawn; with `like`, the
    time axis is at least as long as the other report's. ValueError where there is nothing.
    """
    from matplotlib.patheffects import withStroke

    events = _with_messages_on_their_way(events_of(report, during))
    start, last = min(event.begin for event in events), max(map(_end, events))
    rows = rows_in_flight(events)
    spans = any(event.kind == "span" for event in events)  # they have the first lane
    calls = any(event.kind != "span" for event in events)
    lanes = spans + calls * (1 + max(rows.values(), default=0))
    inches = min(0.3, 1.8 / lanes)
    figure, axes = _canvas(report.world_size, 0.16 + inches * lanes)
    hatches = _legend(figure, events)
    others = [events_of(like, during)] if like else []
    widths = [max(map(_end, es)) - min(e.begin for e in es) for es in (events, *others)]
    width = max(widths) * 1e3 * 1.02
    axes.set_xlim(0, width)
    thinnest = 4 * (last - start)  # of what could not be seen: in milliseconds, 0.4%
    for event in events:
        end = _end(event) if event.end else last
        length = max(1e3 * (end - event.begin), thinnest)
        lane = 0 if event.kind == "span" else spans + rows.get((event.rank, event.index), 0)
        top, left = event.rank - 0.43 + 0.86 * lane / lanes, 1e3 * (event.begin - start)
        look = _look(event) | {"hatch": hatches.get(event.op, "")}
        axes.broken_barh([(left, length)], (top, 0.86 / lanes), **look)
        name = _name(event, length / width)
        if name and inches >= 0.16:  # nine points are an eighth of an inch
            place = (left, top + 0.43 / lanes), (4, 0)
            style = {"textcoords": "offset points", "va": "center_baseline", "fontsize": 9}
            text = axes.annotate(name, *place, color=INK, **style)
            if event.kind != "span":  # a rim in place of a plate, which would cover the bar
                text.set_path_effects([withStroke(linewidth=3, foreground="white")])
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


def _is_on_its_way(event: Event) -> bool:  # it may have arrived before its wait returned
    return event.kind == "p2p" and event.done is not None


def _end(event: Event) -> float:
    return max(event.end or event.begin, event.done or event.begin)


def rows_in_flight(events: Sequence[Event]) -> dict[tuple[int, int], int]:
    """By (rank, index): the first row where nothing else of that rank is on its way."""
    rows: dict[tuple[int, int], int] = {}
    free_from: dict[int, list[float]] = {}  # by rank: when each of its rows is free again
    for event in (event for event in events if event.done):
        ends = free_from.setdefault(event.rank, [])
        row = next((i for i, end in enumerate(ends) if end <= event.begin), len(ends))
        ends[row : row + 1] = [event.done]
        rows[event.rank, event.index] = row
    return rows


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


def _legend(figure, events: Sequence[Event]) -> dict[str, str]:
    """Name what is drawn, above it; returns the hatch of each operation."""
    from matplotlib.patches import Patch

    collectives = dict.fromkeys(e.op for e in events if e.kind == "collective")
    hatches = {"wait": ".."} | dict(zip(collectives, cycle(HATCHES), strict=False))
    grey, patches = NAMELESS.fill, []
    names = [e.note for e in events if e.kind == "span"]  # "0 block forward" is a block
    if spans := dict.fromkeys(name.lstrip("0123456789 ").split()[0] for name in names):
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


def _look(event: Event) -> dict[str, object]:
    fill = tone(event.rank).fill
    if event.kind == "span":
        return {"facecolor": fill, "edgecolor": fill, "alpha": 0.35, "linewidth": 0.7}
    if _is_on_its_way(event):
        return {"facecolor": "none", "edgecolor": fill, "alpha": 0.9, "linewidth": 1.5}
    return {"facecolor": fill, "edgecolor": "white", "alpha": 0.9, "linewidth": 0.7}


def _name(event: Event, share: float) -> str:
    """What fits into a bar of so much of the width: of a span, maybe only the first word."""
    of_bytes = event.done is not None and event.nbytes
    text = bytes_text(event.nbytes) if of_bytes else event.note or event.op
    if share >= 0.02 + 0.009 * len(text):
        return text
    word = text.split()[0]
    return word if event.kind == "span" and share >= 0.003 + 0.009 * len(word) else ""
