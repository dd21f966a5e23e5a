"""A film of what ranks hold and send, from a traced run: step by step, forward and back.

The short way: `film(launch(worker, 2, trace=True))` shows the messages of any worker one by
one, what it computed in a `span`, and last the calls that never came back, as in
`film(sys.last_value.report)` in the cell after an error.

The long way: a worker, or a wrapper around it in the chapter's `figures`, says with `frame`
what its rank holds after each step. A *brick* is what is in one slot: a shard, a chunk, a
micro-batch. What is new is lit, and an arrow leads to it from each rank that sent it, as the
recorder saw.

    def worker(rank, world_size):
        mine = torch.tensor([10**rank])
        frame("Each rank has a number of its own.", {"sum": [rank], "model": ("w", 0)})
        dist.all_reduce(mine)
        frame("Each rank has the sum of all.", {"sum": range(world_size), "model": ("w", 0)})

    film(launch(worker, 4, trace=True))

Every frame names all that the rank holds. One sentence a frame, of 60 letters for each slot;
at most seven slots, eight ranks and a dozen steps. The film is a cell's result: it steps in
JupyterLab and on web pages, can be played where no script runs, and is a strip of at most
eight frames in print.
"""

import html
import json
import os
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mgpu_tutorial.lab.colours import tone
from mgpu_tutorial.lab.draw import sequence_chart
from mgpu_tutorial.lab.draw.controls import in_a_column
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing, animated
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import current

PART, BRICK, ROW, HEAD, LEFT, GAP, LINE, APART = 17, 28, 46, 24, 64, 29, 19, 6  # pixels
Brick = tuple  # of the parts' numbers, or of a text and the rank whose colour it has


def frame(
    says: str,
    bricks: Mapping[str, Iterable[int] | str | tuple[str, int]],
    came: Mapping[str, tuple[int, str] | None] | None = None,
    step: int | None = None,
    unit: str = "step",
) -> None:
    """Note what this rank holds after a step, for the film.

    `says` is the sentence of the step; where ranks differ, the lowest rank's counts. `bricks`
    has for each slot the ranks whose parts are in it, or a text in this rank's colour, or a
    text and the rank whose colour it has. `came` names the rank and slot that a brick came
    from, where the slots differ, or None where no arrow is to lead to it. Ranks that do
    different things number their steps, from 0. A film of another `unit` counts it from 1.
    """
    if recorder := current():
        rank = int(os.environ["RANK"])
        own = {slot: (b, rank) for slot, b in bricks.items() if isinstance(b, str)}
        held = {slot: list(brick) for slot, brick in (bricks | own).items()}
        fields = {"says": says, "bricks": held, "came": came or {}, "step": step}
        fields["unit"] = unit
        recorder.end(recorder.begin("frame", note=json.dumps(fields)))


class Film:
    """Frames to step through by slider and arrow keys; an image where nothing runs."""

    def __init__(
        self, frames: list[Drawing], unit: str = "step", still: int | None = None
    ) -> None:
        self.frames, self.unit, self.first = frames, unit, int(unit != "step")
        self.at = len(frames) - 1 if still is None else still  # the frame that stands alone

    @property
    def names(self) -> list[str]:
        return [f"{self.unit} {i}" for i, _ in enumerate(self.frames, self.first)]

    def __repr__(self) -> str:
        pairs = zip(self.names, self.frames, strict=True)
        return "\n".join(f"{name}\n{frame.text}" for name, frame in pairs)

    def widget(self):
        """The frames sit in the page, and stepping needs no answer from the kernel."""
        import ipywidgets as widgets

        last = len(self.frames) - 1
        stack = widgets.Stack([widgets.HTML(frame.html()) for frame in self.frames])
        play = widgets.Play(0, 0, last, interval=1500, layout={"display": "none"})
        words = f"play the {self.unit}s, or stop"
        run = widgets.ToggleButton(description="Play", tooltip=words, layout={"width": "4em"})
        places = [f"{i + self.first} of {last + self.first}" for i in range(last + 1)]
        slider = widgets.SelectionSlider(options=places, description=self.unit)
        look = {"layout": {"width": "6em"}}
        back = widgets.Button(description="◀ Back", tooltip=f"one {self.unit} back", **look)
        on = widgets.Button(description="Next ▶", tooltip=f"one {self.unit} on", **look)
        widgets.jslink((run, "value"), (play, "playing"))  # whose own buttons have no names
        widgets.jslink((play, "value"), (slider, "index"))
        widgets.jslink((slider, "index"), (stack, "selected_index"))
        for button, way in ((back, -1), (on, 1)):

            def go(_: object, way: int = way) -> None:
                slider.index = min(max(slider.index + way, 0), last)

            button.on_click(go)
        return in_a_column(widgets.HBox([run, back, slider, on, play]), stack)

    def still(self) -> str:
        """A frame, and all of them folded; a web page's script steps through them.

        Nothing moves until the reader opens a fold, and closing it ends that.
        """
        figures = "".join(
            f'<figure style="display:inline-block;width:47%;min-width:280px;margin:4px">'
            f"<figcaption>{name}</figcaption>{frame.html()}</figure>"
            for name, frame in zip(self.names, self.frames, strict=True)
        )
        said = f"<pre>{html.escape(repr(self))}</pre>"  # where a viewer takes pictures out
        folded = {
            f"Play the {self.unit}s": animated(self.frames, rounds="infinite").html(),
            f"The {self.unit}s side by side": figures,
            f"The {self.unit}s in words": said,
        }
        folds = "".join(
            f"<details><summary>{name}</summary>{shown}</details>"
            for name, shown in folded.items()
        )
        where = f"<p>{self.names[self.at].capitalize()} of {self.names[-1].split()[1]}.</p>"
        return f'<div class="film">{self.frames[self.at].html()}{where}{folds}</div>'

    def _repr_mimebundle_(self, **_: object) -> dict:
        own = {"text/plain": repr(self), "text/html": self.still()}
        return self.widget()._repr_mimebundle_() | own


def film(report: Report) -> Film:
    """The frames that the ranks noted; without any, the messages of the run one by one.

    Raises ValueError where nothing was recorded.
    """
    steps = steps_of(report)
    if not steps:
        return Film(sequence_chart.frames(report))
    frames = [_Frame(steps, i).draw() for i in range(len(steps))]
    return Film(frames, steps[0].unit, still=len(frames) // 2)


@dataclass
class Step:
    """What every rank holds after a step, and where what is new came from."""

    says: str
    held: list[dict[str, Brick]]  # by rank
    moves: list[tuple[int, str, int, str]] = field(default_factory=list)
    lit: set[tuple[int, str]] = field(default_factory=set)
    unit: str = "step"


def steps_of(report: Report) -> list[Step]:
    noted: dict[int, dict[int, dict]] = defaultdict(dict)  # by step and rank
    sent: dict[int, set[tuple[int, int]]] = defaultdict(set)  # by step: from and to
    for rank in range(report.world_size):
        number, since = -1, set()
        for event in (e for e in report.events if e.rank == rank):
            if event.kind == "frame":
                fields = json.loads(event.note)
                number = number + 1 if fields["step"] is None else fields["step"]
                noted[number][rank] = fields
                sent[number] |= since
                since = set()
            elif event.sends:
                since.add((rank, event.peer))
            elif event.kind == "collective":
                since |= {(rank, other) for other in event.group if other != rank}
    steps = [Step("", [{}] * report.world_size)]
    for number, now in sorted(noted.items()):
        says = next((fields["says"] for fields in now.values() if fields["says"]), "")
        unit = next(iter(now.values()))["unit"]
        steps.append(Step(says, list(steps[-1].held), unit=unit))
        for rank, fields in now.items():
            bricks = {slot: brick for slot, brick in fields["bricks"].items() if brick}
            steps[-1].held[rank] = {
                slot: tuple(brick if isinstance(brick[0], str) else sorted(brick))
                for slot, brick in bricks.items()
            }
        if len(steps) > 2:
            _compare(*steps[-2:], now, sent[number])
    return steps[1:]


def _compare(before: Step, step: Step, noted: dict, sent: set[tuple[int, int]]) -> None:
    """Light what is new, and find who sent it."""
    for rank, held in enumerate(step.held):
        came = noted.get(rank, {}).get("came", {})
        for slot, brick in held.items():
            old = before.held[rank].get(slot)
            if brick != old or slot in came:
                step.lit.add((rank, slot))
            if slot in came:
                step.moves += [(*came[slot], rank, slot)] if came[slot] else []
            elif brick != old:
                for other, earlier in enumerate(before.held):
                    there = earlier.get(slot)
                    if (other, rank) in sent and there and _gives(there, brick, old):
                        step.moves.append((other, slot, rank, slot))


def _gives(there: Brick, new: Brick, old: Brick | None) -> bool:
    """Whether a brick of another rank can be the source of what is new in this one."""
    is_text = isinstance(new[0], str) or isinstance(there[0], str)
    return is_text or bool(set(there) & set(new) - set(old or ()))


class _Frame:
    """One step on paper: a row a rank, a column a slot, the sentence above."""

    def __init__(self, steps: list[Step], number: int) -> None:
        self.step, self.number, self.ranks = steps[number], number, len(steps[0].held)
        holdings = [held for step in steps for held in step.held]
        self.slots = list(dict.fromkeys(slot for held in holdings for slot in held))
        bricks = [brick for held in holdings for brick in held.values()]
        longest = max((len(b[0]) for b in bricks if isinstance(b[0], str)), default=0)
        title = 7.4 * max(map(len, self.slots)) + 8 - GAP
        self.wide = max(PART * self.ranks if longest == 0 else 0, 9 * longest + 12, 44, title)
        width = max(LEFT + (self.wide + GAP) * len(self.slots), 400)
        words = [textwrap.wrap(step.says, int(width / 8.7)) for step in steps]
        self.words, self.top = words[number], LINE * max(map(len, words)) + 14 + HEAD
        moved = self._said()
        unit = self.step.unit
        name = f"{unit.capitalize()} {number + (unit != 'step')}."
        alt = f"{name} {self.step.says} {'; '.join(moved)}".strip()
        height = self.top + ROW * self.ranks + 4
        self.drawing = Drawing(width, height, self._text(moved), alt)

    def draw(self) -> Drawing:
        for i, line in enumerate(self.words):
            self.drawing.label(8, 19 + LINE * i, line, 15, anchor="start")
        for column, slot in enumerate(self.slots):
            x = LEFT + (self.wide + GAP) * column + self.wide / 2
            self.drawing.label(x, self.top - 8, slot, 14)
        self._arrows()  # under the bricks, whose texts must be read
        for rank in range(self.ranks):
            y = self.top + ROW * rank
            look = tone(rank).text, "start", "bold"
            self.drawing.label(8, y + 20, f"rank {rank}", 14, *look)
            for slot in self.slots:
                self._brick(rank, slot)
        return self.drawing

    def _corner(self, rank: int, slot: str) -> tuple[float, float]:
        column = self.slots.index(slot)
        return LEFT + (self.wide + GAP) * column, self.top + ROW * rank

    def _brick(self, rank: int, slot: str) -> None:
        x, y = self._corner(rank, slot)
        brick = self.step.held[rank].get(slot)
        if brick is None:
            self.drawing.box(x, y, self.wide, BRICK, FAINT, width=1, dash="3 3", radius=3)
            return
        if isinstance(brick[0], str):
            own = tone(brick[1])
            self.drawing.box(x, y, self.wide, BRICK, own.fill, own.fill, 0, radius=3)
            self.drawing.label(x + self.wide / 2, y + 19, brick[0], 14, own.on, weight="bold")
        else:
            self.drawing.box(x, y, self.wide, BRICK, FAINT, width=0, radius=3)
            part = self.wide / self.ranks
            for other in brick:
                own, left = tone(other), x + part * other
                self.drawing.box(left, y, part, BRICK, own.fill, own.fill, 0, radius=0)
                self.drawing.label(left + part / 2, y + 19, other, 13, own.on, weight="bold")
        ink, thick = (INK, 3.4) if (rank, slot) in self.step.lit else (FAINT, 1)
        self.drawing.box(x, y, self.wide, BRICK, ink, "none", thick, radius=3)

    def _arrows(self) -> None:
        """Within a column they run in the gap beside it, one line for all that meet."""
        lanes: dict[str, list[tuple[set[int], set[int]]]] = defaultdict(list)
        beside: Counter[str] = Counter()
        for rank, slot, target, into in self.step.moves:
            if slot != into:
                self._across(rank, slot, target, into, beside[into])
                beside[into] += 1
                continue
            met = [lane for lane in lanes[slot] if rank in lane[0] or target in lane[1]]
            lanes[slot] = [lane for lane in lanes[slot] if lane not in met]
            joined = zip(({rank}, {target}), *met, strict=True)
            lanes[slot].append(tuple(set().union(*ranks) for ranks in joined))
        for slot, columns in lanes.items():
            for i, (sources, targets) in enumerate(columns):
                self._beside(slot, sources, targets, 8 + 5 * (i % 4))

    def _beside(self, slot: str, sources: set[int], targets: set[int], off: int) -> None:
        x = self._corner(0, slot)[0] + self.wide
        middle = BRICK / 2
        leaves = [self._corner(rank, slot)[1] + middle - APART for rank in sorted(sources)]
        enters = [self._corner(rank, slot)[1] + middle + APART for rank in sorted(targets)]
        ink = tone(min(sources)).text if len(sources) == 1 else INK
        ends = min(leaves + enters), max(leaves + enters)
        self.drawing.line(x + off, ends[0], x + off, ends[1], ink, 2.4)
        for y in leaves:
            self.drawing.line(x, y, x + off, y, ink, 2.4)
        for y in enters:
            self.drawing.line(x + off, y, x + 1, y, ink, 2.4, arrow=True)

    def _across(self, rank: int, slot: str, target: int, into: str, number: int) -> None:
        """Straight to a neighbour; elsewhere through the gap beside the target's column."""
        (x1, y1), (x2, y2) = self._corner(rank, slot), self._corner(target, into)
        half, ink = self.wide / 2, tone(rank).text
        is_near = abs(target - rank) == 1 and abs(x2 - x1) <= self.wide + GAP
        if rank == target:
            x1, x2 = (x1 + 2 * half, x2) if x2 > x1 else (x1, x2 + 2 * half)
            ends = x1, y1 + 14, x2, y2 + 14
        elif is_near:
            y1, y2 = (y1 + BRICK, y2) if target > rank else (y1, y2 + BRICK)
            ends = x1 + half, y1, x2 + half, y2
        else:
            off = 10 + 6 * (number % 3)
            side, lane = (x2, x2 - off) if x2 > x1 else (x2 + 2 * half, x2 + 2 * half + off)
            leaves, turns = (BRICK, ROW) if target > rank else (0, BRICK - ROW)
            self.drawing.line(x1 + half, y1 + leaves, lane, y1 + turns, ink, 2.2)
            self.drawing.line(lane, y1 + turns, lane, y2 + 14, ink, 2.2)
            ends = lane, y2 + 14, side, y2 + 14
        self.drawing.line(*ends, ink, 2.2, arrow=True)

    def _said(self) -> list[str]:
        """The arrows in words: what goes from which ranks to which."""
        origins: dict[tuple[str, str, int], list[int]] = defaultdict(list)
        for rank, slot, target, into in self.step.moves:
            origins[slot, into, target].append(rank)
        said = []
        for (slot, into, target), ranks in origins.items():
            where = slot if slot == into else f"{slot} into {into}"
            who = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            said.append(f"{where}: {who} → rank {target}")
        return said

    def _text(self, moved: list[str]) -> str:
        lines = [self.step.says]
        for rank, held in enumerate(self.step.held):
            bricks = []
            for slot, brick in held.items():
                parts = f"{{{' '.join(map(str, brick))}}}"
                bricks.append(f"{slot} {brick[0] if isinstance(brick[0], str) else parts}")
            lines.append(f"  rank {rank}: {', '.join(bricks) or 'nothing'}")
        return "\n".join([*lines, *(f"  {said}" for said in moved)])
