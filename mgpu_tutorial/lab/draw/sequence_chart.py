"""The message sequence chart: who says what to whom, in logical order.

An event stands one row below the one before it on its own rank, and never above the event it
had to wait for; so the same run gives the same picture, however fast each rank was (Lamport's
logical clock, 1978, https://doi.org/10.1145/359545.359563).
"""

import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterator, Set
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from mgpu_tutorial.lab.colours import colour, tone
from mgpu_tutorial.lab.draw.drawing import ALARM, FAINT, INK, PAPER, Drawing
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.lab.words import bytes_text

ROW, TOP, LINE = 36, 58, 20  # pixels
TALL = 11  # rows of a frame, where the run has as many
VEIL = "#ffffffa0"  # white that lets a third through
Key = tuple[int, int]  # rank and index of an event


class MessageLog:
    """The events of a run with their rows, its messages, and its completed collectives.

    A span in which a rank called nothing is an event too, where spans are asked for. Raises
    ValueError where nothing was recorded.
    """

    def __init__(self, report: Report, with_spans: bool = False) -> None:
        self.world_size = report.world_size
        self.events: dict[Key, Event] = {}
        for event, after in pairwise([*report.events, None]):
            is_last = after is None or after.rank != event.rank
            is_over = event.end is not None and (is_last or after.begin >= event.end)
            if event.kind != "frame" and (event.kind != "span" or with_spans and is_over):
                self.events[event.rank, event.index] = event
        if not self.events:
            raise ValueError("nothing was recorded: launch with trace=True")
        self.messages = list(self._matched_messages())
        self.collectives = list(self._matched_collectives())
        ends = [(m, [self.events[key].op for key in m]) for m in self.messages]
        try:
            self.rows = self._laid_out([m for m, ops in ends if ops == ["send", "recv"]])
        except CycleError:  # sends that came back before anybody received, as NCCL's do
            self.rows = self._laid_out([])
        self.height = 1 + max(self.rows.values())

    def _matched_messages(self) -> Iterator[tuple[Key, Key]]:
        """The send and the arrival of each message: a recv, or the wait for an irecv."""
        waits = {(e.rank, e.of): k for k, e in self.events.items() if e.kind == "wait"}
        sends, receives = defaultdict(list), defaultdict(list)
        for key, event in self.events.items():
            if event.sends:
                sends[event.rank, event.peer, event.tag].append(key)
            elif event.kind == "p2p":
                receives[event.peer, event.rank, event.tag].append(key)
        for channel, sources in sends.items():
            for source, target in zip(sources, receives[channel], strict=False):
                arrival = target if self.events[target].op == "recv" else waits.get(target)
                if arrival is not None and self.events[arrival].end is not None:
                    yield source, arrival

    def _matched_collectives(self) -> Iterator[list[Key]]:
        calls: dict[tuple, list[Key]] = defaultdict(list)
        turns: Counter[tuple] = Counter()
        for key, event in self.events.items():
            if event.kind == "collective":
                turns[event.rank, event.group] += 1
                calls[event.group, turns[event.rank, event.group], event.op].append(key)
        for (group, _, _), keys in calls.items():
            done = all(self.events[key].end is not None for key in keys)
            if done and len(keys) == len(group):
                yield keys

    def _laid_out(self, met: list[tuple[Key, Key]]) -> dict[Key, int]:
        """Each event below the one before it on its rank, and not above what it waited for.

        Events that have met share a row; a collective that would cover another moves down.
        """
        group = {key: (key,) for key in self.events}
        for keys in (*met, *self.collectives):
            group |= dict.fromkeys(keys, tuple(keys))
        above = defaultdict(list)  # by event: what it is below, and by how many rows at least
        for source, target in self.messages:
            above[target].append((source, 0))
        for before, key in pairwise(sorted(self.events)):
            if before[0] == key[0]:
                above[key].append((before, 1))
        order: TopologicalSorter = TopologicalSorter()
        for key in self.events:
            order.add(group[key], *{group[other] for other, _ in above[key]} - {group[key]})
        rows: dict[Key, int] = {}
        taken: dict[int, set[int]] = defaultdict(set)  # by row: the ranks that are covered
        for keys in order.static_order():
            needs = [need for key in keys for need in above[key]]
            row = max((rows.get(other, 0) + least for other, least in needs), default=0)
            if self.events[keys[0]].kind == "collective":
                ranks = [rank for rank, _ in keys]
                covered = set(range(min(ranks), max(ranks) + 1))
                while taken[row] & covered:
                    row += 1
                taken[row] |= covered
            rows |= dict.fromkeys(keys, row)
        return rows

    def steps(self) -> list[set[Key]]:
        """The events step by step, then the calls that never came back, one more in each.

        A step ends with an arrival, and the notes right under it, or with the call whose
        message arrives later.
        """
        done = {key for key, event in self.events.items() if event.end is not None}
        busy = {self.rows[key] for key in done if self.events[key].kind != "note"}
        met = (*self.messages, *self.collectives)
        ends = {self.rows[key] for keys in met for key in keys}
        after = [min((row for row in busy if row > end), default=self.height) for end in ends]
        bounds = pairwise([0, *sorted({*after, self.height})])
        steps = [{key for key in done if a <= self.rows[key] < b} for a, b in bounds]
        stuck = sorted(self.events.keys() - done)
        return [*filter(None, steps), *(set(stuck[: i + 1]) for i in range(len(stuck)))]


def sequence_chart(report: Report) -> Drawing:
    """Draw the messages of a launch that ran with `trace=True`.

    Raises ValueError where nothing was recorded.
    """
    log = MessageLog(report)
    sheet = _Sheet(log, 0, log.height, 150 if log.world_size > 4 else 190, 96)
    sheet.add(log.events.keys())
    return sheet.drawing


def frames(report: Report) -> list[Drawing]:
    """Draw the run step by step: what is new, pale what came before, a sentence below."""
    log = MessageLog(report, with_spans=True)
    steps = log.steps()
    rows = [[log.rows[key] for key in step] for step in steps]
    tall = min(log.height, max([TALL, *(max(each) - min(each) + 1 for each in rows)]))
    calls = [len(e.op) + 9 for e in log.events.values() if e.kind == "collective"]
    gap = max([140, *(7 * letters for letters in calls)])  # narrow, for a phone
    drawings, before, bottom = [], set(), 0
    for step, own in zip(steps, rows, strict=True):
        bottom = max(bottom, *own)
        sheet = _Sheet(log, max(0, min(bottom - tall + 1, *own)), tall, gap, 76)
        drawing = sheet.drawing
        if before:
            sheet.add(before - step)  # pale, but for the ranks' names
            drawing.box(0, TOP - 20, drawing.width, drawing.height, PAPER, VEIL, 0, radius=0)
        sheet.add(step)
        before |= step
        drawings.append(drawing)
        calls = [f"rank {rank} calls {log.events[rank, i].op}" for rank, i in sorted(step)]
        drawing.text = drawing.text or "\n".join(calls)
    letters = int((drawings[0].width - 20) / 8.6)
    says = []
    for drawing in drawings:
        texts = [line.replace("  ", ": ", 1) for line in drawing.text.splitlines()]
        says.append(textwrap.wrap(" ".join(f"R{text[1:]}." for text in texts), letters))
    for i, (drawing, lines) in enumerate(zip(drawings, says, strict=True)):
        for line, words in enumerate(lines):
            at = drawing.height + LINE * (line + 0.5)
            drawing.label(14, at, words, 15, anchor="start")
        drawing.alt = f"Step {i}. {' '.join(lines)}"
        drawing.height += LINE * max(map(len, says)) + 8
    return drawings


class _Sheet:
    """The rows of a log from `first` on, `tall` of them."""

    def __init__(self, log: MessageLog, first: int, tall: int, gap: int, pill: int) -> None:
        self.log, self.first, self.gap, self.pill = log, first, gap, pill
        self.xs = [15 + gap * (rank + 0.5) for rank in range(log.world_size)]
        alt = f"Message sequence chart of {log.world_size} ranks"
        height = TOP + ROW * tall + 10
        self.drawing = Drawing(gap * log.world_size + 30, height, "", alt)
        for rank, x in enumerate(self.xs):
            self.drawing.line(x, 36, x, height - 8, FAINT, 1.2, "4 4")
            self.drawing.box(x - 42, 8, 84, 28, colour(rank), colour(rank))
            look = {"size": 14, "colour": tone(rank).on, "weight": "bold"}
            self.drawing.label(x, 27, f"rank {rank}", **look)

    def add(self, keys: Set[Key]) -> None:
        """Draw these events; what is drawn later lies on top."""
        self.keys = {key for key in keys if self.log.rows[key] >= self.first}
        self.lines: list[tuple[int, int, str]] = []  # row, rank, words of the text
        self._collectives()
        messages = [m for m in self.log.messages if m[1] in self.keys]
        for source, target in messages:
            ink = tone(source[0]).text
            self.drawing.line(*self._ends(source, target), ink, 2.2, arrow=True)
        self._events()
        for source, target in messages:
            self._label(source, target)
        self.drawing.text = "\n".join(words for _, _, words in sorted(self.lines))

    def _y(self, key: Key) -> float:
        return TOP + ROW * (max(self.log.rows[key], self.first - 0.5) - self.first + 0.5)

    def _say(self, key: Key, rank: int, words: str) -> None:
        self.lines.append((self.log.rows[key], rank, words))

    def _pill(self, x: float, y: float, *look: object) -> None:
        self.drawing.box(x - self.pill / 2, y - 12, self.pill, 24, *look)

    def _collectives(self) -> None:
        for keys in filter(self.keys.issuperset, self.log.collectives):
            event, ranks = self.log.events[keys[0]], [rank for rank, _ in keys]
            call = event.op + (f"  {bytes_text(event.nbytes)}" if event.nbytes else "")
            left, right, y = self.xs[min(ranks)], self.xs[max(ranks)], self._y(keys[0])
            self.drawing.box(left - 24, y - 13, right - left + 48, 26, INK, "#eeeeee")
            for rank in ranks:
                x = self.xs[rank] - 7
                self.drawing.box(x, y - 7, 14, 14, INK, colour(rank), 1, "", 7)
            middle = self.gap / 2 if len(self.xs) > 1 else 0
            self.drawing.label(left + middle, y + 5, call, 13)
            self._say(keys[0], -1, f"ranks {', '.join(map(str, ranks))}  {call}")

    def _ends(self, source: Key, target: Key) -> tuple[float, float, float, float]:
        half = self.pill / 2 if target[0] > source[0] else -self.pill / 2
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
        words = f"rank {event.rank} → rank {target[0]}  {text.replace(' tag', ', tag')}"
        self._say(target, event.rank, words)

    def _events(self) -> None:
        met = {key for keys in self.log.collectives for key in keys}
        for key, event in self.log.events.items():
            if key in met or key not in self.keys:
                continue
            x, y, own = self.xs[event.rank], self._y(key), tone(event.rank)
            if event.kind == "note":
                look = {"weight": "bold", "halo": True}
                self.drawing.label(x, y + 5, event.note, 14, own.text, **look)
                self._say(key, event.rank, f"rank {event.rank}  {event.note}")
            elif event.end is None:
                self._open_call(key, event, x, y)
            elif event.kind == "span":
                self._pill(x, y, own.fill, own.fill)
                self.drawing.label(x, y + 5, event.note, 14, own.on, weight="bold")
                self._say(key, event.rank, f"rank {event.rank} computes {event.note}")
            else:
                self._pill(x, y, own.fill, PAPER, 2, "", 12)
                self.drawing.label(x, y + 5, event.op, 13)

    def _open_call(self, key: Key, event: Event, x: float, y: float) -> None:
        """A call that never came back: dashed, with a question mark towards its peer."""
        self._pill(x, y, ALARM, PAPER, 2, "5 3", 12)
        self.drawing.label(x, y + 5, f"{event.op} …", 13)
        if event.kind == "p2p" and event.peer is not None:
            sign = 1 if event.peer > event.rank else -1
            near, far = x + sign * self.pill / 2, x + sign * (self.gap / 2 - 17)
            self.drawing.line(near, y, far, y, ALARM, 2, "4 3")
            self.drawing.label(far + sign * 8, y + 5, "?", 15, ALARM, weight="bold")
        whom = f" for rank {event.peer}" if event.peer is not None else ""
        self._say(key, event.rank, f"rank {event.rank} waits in {event.op}{whom}")
