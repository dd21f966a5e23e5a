"""The message sequence chart: who says what to whom, in logical order.

A row is not a time. An event stands one row below the one before it on its own
rank, and never above the event it had to wait for; so the same run gives
the same picture, however fast each rank was (Lamport's logical clock, 1978,
https://doi.org/10.1145/359545.359563).
"""

from collections import defaultdict
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

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
    """Match sends with receives and collectives with each other, and lay out the rows.

    Raises ValueError where nothing was recorded.
    """
    events = {(e.rank, e.index): e for e in report.events if e.kind != "span"}
    if not events:
        raise ValueError("nothing was recorded: launch with trace=True")
    log = MessageLog(report.world_size, events)
    _match_messages(log)
    _match_collectives(log)
    met = [m for m in log.messages if [events[key].op for key in m] == ["send", "recv"]]
    try:
        _lay_out(log, met)
    except CycleError:  # sends that came back before anybody received, as NCCL's do
        _lay_out(log, [])
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


def _lay_out(log: MessageLog, met: list[tuple[Key, Key]]) -> None:
    """Put each event below the one before it on its rank, and not above what it waited for.

    Events that have met share a row; a collective that would cover another moves down.
    """
    group = {key: (key,) for key in log.events}
    for keys in (*met, *log.collectives):
        group |= dict.fromkeys(keys, tuple(keys))
    above = defaultdict(list)  # by event: what it is below, and by how many rows at least
    for source, target in log.messages:
        above[target].append((source, 0))
    for before, key in pairwise(sorted(log.events)):
        if before[0] == key[0]:
            above[key].append((before, 1))
    order: TopologicalSorter = TopologicalSorter()
    for key in log.events:
        order.add(group[key], *{group[other] for other, _ in above[key]} - {group[key]})
    taken: dict[int, set[int]] = defaultdict(set)  # by row: the ranks that are covered
    for keys in order.static_order():
        needs = [need for key in keys for need in above[key]]
        row = max((log.rows.get(other, 0) + least for other, least in needs), default=0)
        if log.events[keys[0]].kind == "collective":
            ranks = [rank for rank, _ in keys]
            covered = set(range(min(ranks), max(ranks) + 1))
            while taken[row] & covered:
                row += 1
            taken[row] |= covered
        log.rows |= dict.fromkeys(keys, row)


def sequence_chart(report: Report) -> Drawing:
    """Draw the messages of a launch that ran with `trace=True`.

    Raises ValueError where nothing was recorded.
    """
    log = message_log(report)
    return _Sheet(log, 0, log.height - 1, log.height).draw()


def frames(report: Report) -> list[Drawing]:
    """Draw each step of the run alone, all frames of one size."""
    log = message_log(report)
    steps = log.steps()
    tallest = max(last - first + 1 for first, last in steps)
    return [_Sheet(log, first, last, tallest).draw() for first, last in steps]


class _Sheet:
    """The rows `first` to `last` of a log on paper that is `tall` rows high."""

    def __init__(self, log: MessageLog, first: int, last: int, tall: int) -> None:
        self.log, self.first, self.last = log, first, last
        gap = 150 if log.world_size > 4 else 190
        self.xs = [15 + gap * (rank + 0.5) for rank in range(log.world_size)]
        alt = f"Message sequence chart of {log.world_size} ranks"
        self.drawing = Drawing(gap * log.world_size + 30, TOP + ROW * tall + 10, "", alt)
        self.lines: list[tuple[int, int, str]] = []  # row, rank, words

    def draw(self) -> Drawing:
        """The finished sheet: what is drawn later lies on top."""
        self._lifelines()
        self._collectives()
        messages = [m for m in self.log.messages if self._shows(m[1])]
        for source, target in messages:
            self.drawing.line(*self._ends(source, target), colour(source[0]), 2.2, arrow=True)
        self._events()
        for source, target in messages:
            self._label(source, target)
        self.drawing.text = "\n".join(words for _, _, words in sorted(self.lines))
        return self.drawing

    def _shows(self, key: Key) -> bool:
        return self.first <= self.log.rows[key] <= self.last

    def _y(self, key: Key) -> float:
        return TOP + ROW * (max(self.log.rows[key], self.first - 0.5) - self.first + 0.5)

    def _say(self, key: Key, rank: int, words: str) -> None:
        self.lines.append((self.log.rows[key], rank, words))

    def _lifelines(self) -> None:
        for rank, x in enumerate(self.xs):
            self.drawing.line(x, 36, x, self.drawing.height - 8, FAINT, 1.2, "4 4")
            self.drawing.box(x - 42, 8, 84, 28, colour(rank), colour(rank))
            self.drawing.label(x, 27, f"rank {rank}", 14, tone(rank).on, weight="bold")

    def _collectives(self) -> None:
        for keys in filter(lambda keys: self._shows(keys[0]), self.log.collectives):
            event, ranks = self.log.events[keys[0]], [rank for rank, _ in keys]
            call = event.op + (f"  {bytes_text(event.nbytes)}" if event.nbytes else "")
            left, right, y = self.xs[min(ranks)], self.xs[max(ranks)], self._y(keys[0])
            self.drawing.box(left - 24, y - 13, right - left + 48, 26, INK, "#eeeeee")
            for rank in ranks:
                x = self.xs[rank] - 7
                self.drawing.box(x, y - 7, 14, 14, INK, colour(rank), 1, "", 7)
            middle = (self.xs[1] - self.xs[0]) / 2 if len(self.xs) > 1 else 0
            self.drawing.label(left + middle, y + 5, call, 13)
            self._say(keys[0], -1, f"ranks {', '.join(map(str, ranks))}  {call}")

    def _ends(self, source: Key, target: Key) -> tuple[float, float, float, float]:
        half = PILL / 2 if target[0] > source[0] else -PILL / 2
        x1, x2 = self.xs[source[0]] + half, self.xs[target[0]] - half
        return x1, self._y(source), x2, self._y(target)

    def _label(self, source: Key, target: Key) -> None:
        """The bytes of a message, over its arrow or near its sender."""
        event, (x1, y1, x2, y2) = self.log.events[source], self._ends(source, target)
        size, tag = bytes_text(event.nbytes), f"tag {event.tag}"
        if y1 == y2:
            x, y, side = x1 + (x2 - x1) * min(0.5, 44 / abs(x2 - x1)), y1 - 6, "middle"
        else:
            x, y, side = (x1 + 5, y1 - 4, "start") if x2 > x1 else (x1 - 5, y1 - 4, "end")
        text, ink = f"{size} {tag}" if event.tag else size, tone(event.rank).text
        self.drawing.label(x, y, text, 14, ink, side, "bold", halo=True)
        text = f"{size}, {tag}" if event.tag else size
        self._say(target, event.rank, f"rank {event.rank} → rank {target[0]}  {text}")

    def _events(self) -> None:
        met = {key for keys in self.log.collectives for key in keys}
        for key, event in self.log.events.items():
            if key in met or not self._shows(key):
                continue
            x, y, own = self.xs[event.rank], self._y(key), tone(event.rank)
            if event.kind == "note":
                look = {"weight": "bold", "halo": True}
                self.drawing.label(x, y + 5, event.note, 14, own.text, **look)
                self._say(key, event.rank, f"rank {event.rank}  {event.note}")
            elif event.end is None:
                self._open_call(key, event, x, y)
            else:
                self.drawing.box(x - PILL / 2, y - 12, PILL, 24, own.fill, width=2, radius=12)
                self.drawing.label(x, y + 5, event.op, 13)

    def _open_call(self, key: Key, event: Event, x: float, y: float) -> None:
        """A call that never came back: dashed, with a question mark towards its peer."""
        self.drawing.box(x - PILL / 2, y - 12, PILL, 24, ALARM, "#ffffff", 2, "5 3", 12)
        self.drawing.label(x, y + 5, f"{event.op} …", 13)
        if event.kind == "p2p" and event.peer is not None:
            sign = 1 if event.peer > event.rank else -1
            near, far = x + sign * PILL / 2, x + sign * (PILL / 2 + 30)
            self.drawing.line(near, y, far, y, ALARM, 2, "4 3")
            self.drawing.label(far + sign * 8, y + 5, "?", 15, ALARM, weight="bold")
        whom = f" for rank {event.peer}" if event.peer is not None else ""
        self._say(key, event.rank, f"rank {event.rank} waits in {event.op}{whom}")
