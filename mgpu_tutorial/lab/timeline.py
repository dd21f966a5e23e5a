"""The timeline: the same events on a wall clock, one lane a rank (or a thread)."""

from mgpu_tutorial.lab.plot import Plot
from mgpu_tutorial.lab.report import Report, colour_of
from mgpu_tutorial.lab.trace import Event

HATCHES = {"p2p": "", "collective": "//", "wait": "..", "span": ""}


def timeline(report: Report, like: Report | None = None) -> Plot:
    """Draw when each rank (or thread) did what, in milliseconds since the first event.

    Communication is a full bar (hatched for a collective, dotted for a wait) and a
    `span` a pale one above it. With `like`, the time axis is that of the other report's
    timeline where that one is longer. Raises ValueError where nothing was recorded.
    """
    events = [e for e in report.events if e.kind != "note"]
    if not events:
        raise ValueError("nothing was recorded: launch with trace=True")
    start = min(event.begin for event in events)
    last = max(event.end or event.begin for event in events)
    lanes = [report.lane(rank) for rank in range(report.world_size)]
    flat = all(event.kind == "span" for event in events)  # no room for communication
    figure, axes = _canvas(lanes, 0.5 if flat else 0.75)
    axes.set_xlim(0, max(_length(report), _length(like)) * 1e3 * 1.02)
    for event in events:
        begin = (event.begin - start) * 1e3
        length = ((event.end or last) - event.begin) * 1e3
        tone = colour_of(lanes[event.rank])
        _bar(axes, event, tone, begin, max(length, last - start), flat)
    names = ", ".join(dict.fromkeys(e.note or e.op for e in events))
    counts = f"{len(events)} intervals"
    what = "threads" if report.lanes else "ranks"
    return Plot(figure, f"timeline of {report.world_size} {what}, {counts}: {names}")


def _length(report: Report | None) -> float:
    events = [e for e in report.events if e.kind != "note"] if report else []
    begins, ends = [e.begin for e in events], [e.end or e.begin for e in events]
    return max(ends) - min(begins) if events else 0.0


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


def _bar(axes, event: Event, tone: str, begin: float, length: float, flat: bool) -> None:
    is_span = event.kind == "span"
    y, height = (event.rank - 0.42, 0.3) if is_span else (event.rank - 0.1, 0.44)
    if flat:
        y, height = event.rank - 0.3, 0.6
    axes.broken_barh(
        [(begin, length)],
        (y, height),
        facecolor=tone,
        alpha=0.35 if is_span else 0.9,
        hatch=HATCHES[event.kind],
        edgecolor="white" if not is_span else tone,
    )
    text = event.note or event.op
    share = length / axes.get_xlim()[1]
    if share < 0.06:  # too narrow for words: a number perhaps, as in "1 scatter"
        text = text.split()[0] if text[0].isdigit() and share > 0.012 else ""
    axes.text(
        begin,
        y + height / 2,
        f" {text}",
        va="center",
        fontsize=9,
        clip_on=True,
        color="black" if is_span else "white",
    )
