"""The message sequence chart: who says what to whom, in logical order.

A row is not a time. An event stands one row below the one before it on its own
rank, and never above the event it had to wait for; so the same conversation gives
the same picture, however fast each rank was (Lamport's logical clock, 1978,
https://doi.org/10.1145/359545.359563).
"""

from collections import defaultdict
from dataclasses import dataclass, field

from mgpu_tutorial.lab.drawing import ALARM, FAINT, INK, Drawing
from mgpu_tutorial.lab.report import Report, colour
from mgpu_tutorial.lab.trace import Event

ROW, TOP, PILL = 36, 58, 96
Key = tuple[int, int]  # rank and index of an event


@dataclass
class Conversation:
    """The events of a run with their rows and the messages between them."""

    world_size: int
    events: dict[Key, Event]
    messages: list[tuple[Key, Key]] = field(default_factory=list)
    meetings: list[list[Key]] = field(default_factory=list)
    rows: dict[Key, int] = field(default_factory=dict)

    @property
    def height(self) -> int:
        return 1 + max(self.rows.values(), default=-1)

    def beats(self) -> list[int]:
        """The last row of each step: a step ends where something arrives or is noted."""
        ends = {self.rows[target] for _, target in self.messages}
        ends |= {self.rows[keys[0]] for keys in self.meetings}
        ends |= {self.rows[k] for k, e in self.events.items() if e.kind == "note"}
        return sorted(ends | {self.height - 1})


def converse(report: Report) -> Conversation:
    """Match sends with receives and collectives with each other, and lay out the rows."""
    events = {(e.rank, e.index): e for e in report.events if e.kind != "span"}
    talk = Conversation(report.world_size, events)
    _match_messages(talk)
    _match_collectives(talk)
    _lay_out(talk)
    return talk


def _match_messages(talk: Conversation) -> None:
    waits = {(e.rank, e.of): k for k, e in talk.events.items() if e.kind == "wait"}
    sends, receives = defaultdict(list), defaultdict(list)
    for key, event in talk.events.items():
        if event.kind != "p2p":
            continue
        if event.sends:
            sends[event.rank, event.peer, event.tag].append(key)
        else:
            receives[event.peer, event.rank, event.tag].append(key)
    for channel, sources in sends.items():
        for source, target in zip(sources, receives[channel], strict=False):
            arrival = target if talk.events[target].op == "recv" else waits.get(target)
            if arrival is not None and talk.events[arrival].end is not None:
                talk.messages.append((source, arrival))


def _match_collectives(talk: Conversation) -> None:
    calls: dict[tuple, list[Key]] = defaultdict(list)
    counts: dict[tuple, int] = defaultdict(int)
    for key, event in talk.events.items():
        if event.kind == "collective":
            turn = counts[event.rank, event.group]
            counts[event.rank, event.group] += 1
            calls[event.group, turn, event.op].append(key)
    for (group, _, _), keys in calls.items():
        done = all(talk.events[key].end is not None for key in keys)
        if done and len(keys) == len(group):
            talk.meetings.append(keys)


def _lay_out(talk: Conversation) -> None:
    """The longest path to each event; events that meet share the lowest of their rows."""
    together: dict[Key, list[Key]] = {key: keys for keys in talk.meetings for key in keys}
    for source, target in talk.messages:
        if talk.events[source].op == "send" and talk.events[target].op == "recv":
            together[source] = together[target] = [source, target]
    before = {}
    for rank in range(talk.world_size):
        keys = [key for key in talk.events if key[0] == rank]
        before |= dict(zip(keys[1:], keys, strict=False))
    rows = dict.fromkeys(talk.events, 0)
    for _ in range(len(rows) + 1):
        old = dict(rows)
        for key in rows:
            if key in before:
                rows[key] = max(rows[key], rows[before[key]] + 1)
        for source, target in talk.messages:
            rows[target] = max(rows[target], rows[source])
        for key, keys in together.items():
            rows[key] = max(rows[k] for k in keys)
        if rows == old:
            break
    talk.rows = rows


def sequence_chart(report: Report, upto: int | None = None) -> Drawing:
    """Draw the conversation of a launch that ran with `trace=True`.

    With `upto`, only the rows up to this one are drawn in full and the row itself is
    marked: the frames of the stepper. Raises ValueError where nothing was recorded.
    """
    talk = converse(report)
    if not talk.events:
        raise ValueError("nothing was recorded: launch with trace=True")
    gap = 150 if talk.world_size > 4 else 190
    width = gap * talk.world_size + 30
    alt = f"Message sequence chart of {talk.world_size} ranks, {len(talk.messages)} messages"
    strip = (
        30 if any(e.kind == "note" for e in talk.events.values()) and upto is not None else 0
    )
    height = TOP + ROW * talk.height + 14 + strip
    drawing = Drawing(width, height, describe(talk), alt)
    xs = [15 + gap * (rank + 0.5) for rank in range(talk.world_size)]
    if upto is not None:
        first = max([b + 1 for b in talk.beats() if b < upto], default=0)
        y = TOP + ROW * first
        drawing.box(4, y, width - 8, ROW * (upto - first + 1), "none", "#fff3c4")
    for rank, x in enumerate(xs):
        drawing.line(x, 36, x, height - 8 - strip, FAINT, 1.2, "4 4")
        drawing.box(x - 42, 8, 84, 28, colour(rank), colour(rank))
        drawing.label(x, 27, f"rank {rank}", 14, "#ffffff", weight="bold")
    shown = {k for k, row in talk.rows.items() if upto is None or row <= upto}
    _draw_meetings(drawing, talk, xs, shown)
    _draw_messages(drawing, talk, xs, shown)
    _draw_events(drawing, talk, xs, shown)
    if strip:
        _draw_state(drawing, talk, xs, shown, height - 14)
    return drawing


def _y(talk: Conversation, key: Key) -> float:
    return TOP + ROW * (talk.rows[key] + 0.5)


def _draw_meetings(drawing: Drawing, talk: Conversation, xs: list[float], shown: set) -> None:
    for keys in talk.meetings:
        if keys[0] not in shown:
            continue
        left, right = min(xs[r] for r, _ in keys), max(xs[r] for r, _ in keys)
        y = _y(talk, keys[0])
        drawing.box(left - 56, y - 13, right - left + 112, 26, INK, "#eeeeee", 1.5)
        for rank, _ in keys:
            drawing.box(xs[rank] - 50, y - 5, 10, 10, colour(rank), colour(rank))
        event = talk.events[keys[0]]
        drawing.label((left + right) / 2 + 6, y + 5, _call(event), 13)


def _draw_messages(drawing: Drawing, talk: Conversation, xs: list[float], shown: set) -> None:
    for source, target in talk.messages:
        if target not in shown:
            continue
        event = talk.events[source]
        sign = 1 if xs[target[0]] > xs[source[0]] else -1
        x1, x2 = xs[source[0]] + sign * PILL / 2, xs[target[0]] - sign * PILL / 2
        y1, y2 = _y(talk, source), _y(talk, target)
        drawing.line(x1, y1, x2, y2, colour(event.rank), 2.2, arrow=True)
        tag = f" tag {event.tag}" if event.tag else ""
        near = 0.5 if abs(target[0] - source[0]) == 1 else 0.5 / abs(target[0] - source[0])
        drawing.label(
            x1 + (x2 - x1) * near,
            y1 + (y2 - y1) * near - 6,
            f"{size(event.nbytes)}{tag}",
            12,
            colour(event.rank),
            weight="bold",
        )


def _draw_events(drawing: Drawing, talk: Conversation, xs: list[float], shown: set) -> None:
    met = {key for keys in talk.meetings for key in keys}
    for key, event in talk.events.items():
        if key in met or key not in shown:
            continue
        x, y, tone = xs[event.rank], _y(talk, key), colour(event.rank)
        if event.kind == "note":
            drawing.label(x, y + 5, event.note, 13, tone, weight="bold")
            continue
        waiting = event.end is None
        drawing.box(
            x - PILL / 2,
            y - 12,
            PILL,
            24,
            ALARM if waiting else tone,
            "#ffffff",
            2,
            "5 3" if waiting else "",
            12,
        )
        drawing.label(x, y + 5, event.op + (" …" if waiting else ""), 13)
        if waiting and event.peer is not None and event.kind == "p2p":
            sign = 1 if xs[event.peer] > x else -1
            end = x + sign * (PILL / 2 + 34)
            drawing.line(x + sign * PILL / 2, y, end, y, ALARM, 2, "4 3")
            drawing.label(end + sign * 8, y + 5, "?", 15, ALARM, weight="bold")


def _draw_state(drawing, talk: Conversation, xs: list[float], shown: set, y: float) -> None:
    for rank, x in enumerate(xs):
        notes = [
            e.note for k, e in talk.events.items() if k in shown and k[0] == rank and e.note
        ]
        drawing.label(x, y, notes[-1] if notes else "", 14, colour(rank), weight="bold")


def _call(event: Event) -> str:
    return event.op + (f"  {size(event.nbytes)}" if event.nbytes else "")


def size(nbytes: float) -> str:
    """A number of bytes as people say it: 16 B, 4 KiB, 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024 or unit == "GiB":
            return f"{nbytes:.3g} {unit}" if unit != "B" else f"{nbytes:.0f} B"
        nbytes /= 1024
    raise AssertionError


def describe(talk: Conversation) -> str:
    """The chart as text, a line for each message, meeting, note and open call."""
    lines: list[tuple[int, int, str]] = []
    for source, target in talk.messages:
        event = talk.events[source]
        tag = f", tag {event.tag}" if event.tag else ""
        what = f"rank {event.rank} → rank {target[0]}  {size(event.nbytes)}{tag}"
        lines.append((talk.rows[target], event.rank, what))
    for keys in talk.meetings:
        event = talk.events[keys[0]]
        ranks = ", ".join(str(rank) for rank, _ in keys)
        lines.append((talk.rows[keys[0]], -1, f"ranks {ranks}  {_call(event)}"))
    for key, event in talk.events.items():
        if event.kind == "note":
            lines.append((talk.rows[key], event.rank, f"rank {event.rank}  {event.note}"))
        elif event.end is None:
            whom = f" for rank {event.peer}" if event.peer is not None else ""
            what = f"rank {event.rank} waits in {event.op}{whom}"
            lines.append((talk.rows[key], event.rank, what))
    return "\n".join(what for _, _, what in sorted(lines))
