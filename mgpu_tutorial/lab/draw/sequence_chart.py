"""The message sequence chart: who says what to whom, in logical order.

A row is not a time. An event stands one row below the one before it on its own
rank, and never above the event it had to wait for; so the same run gives
the same picture, however fast each rank was (Lamport's logical clock, 1978,
https://doi.org/10.1145/359545.359563).
"""

from collections import defaultdict
from dataclasses import dataclass, field

from mgpu_tutorial.lab.colours import colour, tone
from mgpu_tutorial.lab.draw.drawing import ALARM, FAINT, INK, Drawing
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.lab.words import bytes_text

ROW, TOP, PILL = 36, 58, 96
Key = tuple[int, int]  # rank and index of an event


@dataclass
class MessageLog:
    """The events of a run with their rows, its messages, and its completed collectives."""

    world_size: int
    events: dict[Key, Event]
    messages: list[tuple[Key, Key]] = field(default_factory=list)
    collectives: list[list[Key]] = field(default_factory=list)
    rows: dict[Key, int] = field(default_factory=dict)

    @property
    def height(self) -> int:
        return 1 + max(self.rows.values(), default=-1)

    def steps(self) -> list[tuple[int, int]]:
        """First and last row of each step: a step ends with a note, else with an arrival."""
        ends = {self.rows[k] for k, e in self.events.items() if e.kind == "note"}
        if not ends:
            ends = {self.rows[target] for _, target in self.messages}
            ends |= {self.rows[keys[0]] for keys in self.collectives}
        last = sorted(ends | {self.height - 1})
        return list(zip([0, *(row + 1 for row in last)], last, strict=False))


def message_log(report: Report) -> MessageLog:
    """Match sends with receives and collectives with each other, and lay out the rows."""
    events = {(e.rank, e.index): e for e in report.events if e.kind != "span"}
    log = MessageLog(report.world_size, events)
    _match_messages(log)
    _match_collectives(log)
    _lay_out(log)
    return log


def _match_messages(log: MessageLog) -> None:
    waits = {(e.rank, e.of): k for k, e in log.events.items() if e.kind == "wait"}
    sends, receives = defaultdict(list), defaultdict(list)
    for key, event in log.events.items():
        if event.kind != "p2p":
            continue
        if event.sends:
            sends[event.rank, event.peer, event.tag].append(key)
        else:
            receives[event.peer, event.rank, event.tag].append(key)
    for channel, sources in sends.items():
        for source, target in zip(sources, receives[channel], strict=False):
            arrival = target if log.events[target].op == "recv" else waits.get(target)
            if arrival is not None and log.events[arrival].end is not None:
                log.messages.append((source, arrival))


def _match_collectives(log: MessageLog) -> None:
    calls: dict[tuple, list[Key]] = defaultdict(list)
    counts: dict[tuple, int] = defaultdict(int)
    for key, event in log.events.items():
        if event.kind == "collective":
            turn = counts[event.rank, event.group]
            counts[event.rank, event.group] += 1
            calls[event.group, turn, event.op].append(key)
    for (group, _, _), keys in calls.items():
        done = all(log.events[key].end is not None for key in keys)
        if done and len(keys) == len(group):
            log.collectives.append(keys)


def _lay_out(log: MessageLog) -> None:
    """Put each event below the one before it on its rank, and not above what it waited for.

    Events that meet share a row; a collective that would cover another moves down.
    """
    meets = {key: keys for keys in log.collectives for key in keys}
    waited_for = {}
    for source, target in log.messages:
        waited_for[target] = source
        if log.events[source].op == "send" and log.events[target].op == "recv":
            meets[source] = meets[target] = [source, target]
    before = {}
    for rank in range(log.world_size):
        keys = [key for key in log.events if key[0] == rank]
        before |= dict(zip(keys[1:], keys, strict=False))
    rows = log.rows = dict.fromkeys(log.events, 0)
    has_moved = True
    while has_moved and log.height <= len(rows):
        old = dict(rows)
        for key in rows:
            least = [rows[before[key]] + 1] if key in before else []
            least += [rows[waited_for[key]]] if key in waited_for else []
            rows[key] = max(rows[key], *least, *(rows[k] for k in meets.get(key, [key])))
        clash = _first_clash(log) if rows == old else None
        if clash is not None:
            rows[clash] += 1
        has_moved = rows != old


def _first_clash(log: MessageLog) -> Key | None:
    """A collective that would be drawn over another one in the same row."""
    taken: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for keys in sorted(log.collectives):
        ranks = [rank for rank, _ in keys]
        low, high = min(ranks), max(ranks)
        row = log.rows[keys[0]]
        if any(low <= right and left <= high for left, right in taken[row]):
            return keys[0]
        taken[row].append((low, high))
    return None


def sequence_chart(report: Report) -> Drawing:
    """Draw the messages of a launch that ran with `trace=True`.

    Raises ValueError where nothing was recorded.
    """
    log = _recorded(report)
    return _Sheet(log, 0, log.height - 1, log.height).draw()


def frames(report: Report) -> list[Drawing]:
    """Draw each step of the run alone, all frames of one size."""
    log = _recorded(report)
    steps = log.steps()
    tallest = max(last - first + 1 for first, last in steps)
    return [_Sheet(log, first, last, tallest).draw() for first, last in steps]


def _recorded(report: Report) -> MessageLog:
    log = message_log(report)
    if not log.events:
        raise ValueError("nothing was recorded: launch with trace=True")
    return log


class _Sheet:
    """The rows `first` to `last` of a log on paper that is `tall` rows high."""

    def __init__(self, log: MessageLog, first: int, last: int, tall: int) -> None:
        self.log, self.first, self.last = log, first, last
        gap = 150 if log.world_size > 4 else 190
        self.xs = [15 + gap * (rank + 0.5) for rank in range(log.world_size)]
        alt = f"Message sequence chart of {log.world_size} ranks"
        size = gap * log.world_size + 30, TOP + ROW * tall + 10
        self.drawing = Drawing(*size, describe(log, first, last), alt)

    def draw(self) -> Drawing:
        """The finished sheet: what is drawn later lies on top."""
        self._lifelines()
        self._collectives()
        self._arrows()
        self._events()
        self._labels()
        return self.drawing

    def _shows(self, key: Key) -> bool:
        return self.first <= self.log.rows[key] <= self.last

    def _y(self, key: Key) -> float:
        return TOP + ROW * (max(self.log.rows[key], self.first - 0.5) - self.first + 0.5)

    def _lifelines(self) -> None:
        for rank, x in enumerate(self.xs):
            self.drawing.line(x, 36, x, self.drawing.height - 8, FAINT, 1.2, "4 4")
            self.drawing.box(x - 42, 8, 84, 28, colour(rank), colour(rank))
            self.drawing.label(x, 27, f"rank {rank}", 14, tone(rank).on, weight="bold")

    def _collectives(self) -> None:
        for keys in filter(lambda keys: self._shows(keys[0]), self.log.collectives):
            xs = sorted(self.xs[rank] for rank, _ in keys)
            y = self._y(keys[0])
            self.drawing.box(xs[0] - 24, y - 13, xs[-1] - xs[0] + 48, 26, INK, "#eeeeee")
            for rank, _ in keys:
                self.drawing.box(
                    self.xs[rank] - 7, y - 7, 14, 14, INK, colour(rank), 1, "", 7
                )
            middle = (self.xs[0] + self.xs[1]) / 2 - self.xs[0] if len(self.xs) > 1 else 0
            self.drawing.label(xs[0] + middle, y + 5, _call(self.log.events[keys[0]]), 13)

    def _ends(self, source: Key, target: Key) -> tuple[float, float, float, float]:
        sign = 1 if target[0] > source[0] else -1
        x1 = self.xs[source[0]] + sign * PILL / 2
        x2 = self.xs[target[0]] - sign * PILL / 2
        return x1, self._y(source), x2, self._y(target)

    def _arrows(self) -> None:
        for source, target in filter(lambda m: self._shows(m[1]), self.log.messages):
            ends = self._ends(source, target)
            self.drawing.line(*ends, colour(source[0]), 2.2, arrow=True)

    def _labels(self) -> None:
        for source, target in filter(lambda m: self._shows(m[1]), self.log.messages):
            x1, y1, x2, y2 = self._ends(source, target)
            event = self.log.events[source]
            tag = f" tag {event.tag}" if event.tag else ""
            ink, text = tone(event.rank).text, bytes_text(event.nbytes) + tag
            if y1 == y2:  # over the middle, or near the sender of a long arrow
                x = x1 + (x2 - x1) * min(0.5, 44 / abs(x2 - x1))
                self.drawing.label(x, y1 - 6, text, 14, ink, weight="bold", halo=True)
                continue
            side, x = ("start", x1 + 5) if x2 > x1 else ("end", x1 - 5)
            self.drawing.label(x, y1 - 4, text, 14, ink, side, "bold", halo=True)

    def _events(self) -> None:
        met = {key for keys in self.log.collectives for key in keys}
        for key, event in self.log.events.items():
            if key in met or not self._shows(key):
                continue
            x, y, own = self.xs[event.rank], self._y(key), tone(event.rank)
            if event.kind == "note":
                look = {"weight": "bold", "halo": True}
                self.drawing.label(x, y + 5, event.note, 14, own.text, **look)
            elif event.end is None:
                self._open_call(event, x, y)
            else:
                left = x - PILL / 2
                self.drawing.box(left, y - 12, PILL, 24, own.fill, "#ffffff", 2, "", 12)
                self.drawing.label(x, y + 5, event.op, 13)

    def _open_call(self, event: Event, x: float, y: float) -> None:
        """A call that never came back: dashed, with a question mark towards its peer."""
        self.drawing.box(x - PILL / 2, y - 12, PILL, 24, ALARM, "#ffffff", 2, "5 3", 12)
        self.drawing.label(x, y + 5, f"{event.op} …", 13)
        if event.kind == "p2p" and event.peer is not None:
            sign = 1 if event.peer > event.rank else -1
            near, far = x + sign * PILL / 2, x + sign * (PILL / 2 + 30)
            self.drawing.line(near, y, far, y, ALARM, 2, "4 3")
            self.drawing.label(far + sign * 8, y + 5, "?", 15, ALARM, weight="bold")


def _call(event: Event) -> str:
    return event.op + (f"  {bytes_text(event.nbytes)}" if event.nbytes else "")


def describe(log: MessageLog, first: int, last: int) -> str:
    """The chart as text, a line for each message, collective, note and open call."""
    lines: list[tuple[int, int, str]] = []
    for source, target in log.messages:
        event = log.events[source]
        tag = f", tag {event.tag}" if event.tag else ""
        what = f"rank {event.rank} → rank {target[0]}  {bytes_text(event.nbytes)}{tag}"
        lines.append((log.rows[target], event.rank, what))
    for keys in log.collectives:
        event = log.events[keys[0]]
        ranks = ", ".join(str(rank) for rank, _ in keys)
        lines.append((log.rows[keys[0]], -1, f"ranks {ranks}  {_call(event)}"))
    for key, event in log.events.items():
        if event.kind == "note":
            lines.append((log.rows[key], event.rank, f"rank {event.rank}  {event.note}"))
        elif event.end is None:
            whom = f" for rank {event.peer}" if event.peer is not None else ""
            what = f"rank {event.rank} waits in {event.op}{whom}"
            lines.append((log.rows[key], event.rank, what))
    return "\n".join(what for row, _, what in sorted(lines) if first <= row <= last)
