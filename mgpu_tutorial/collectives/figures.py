"""Pictures and times for the notebook on collectives; no lesson is in here."""

import copy
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from mgpu_tutorial.collectives.ring import naive_seconds, ring_all_reduce
from mgpu_tutorial.lab import Table, curves, frame, launch
from mgpu_tutorial.lab.colours import tone
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.measure import in_turns
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.shared.cost_model.links import Link, ring_seconds, tree_seconds

SIDE, HEIGHT, ROW, TOP, LEFT = 38, 22, 25, 24, 66
ARROW, MARGIN, LINE, LETTERS = 116, 10, 18, 38
GAP = 14


TREE_SAYS = (
    "The ring cuts each rank's tensor into four chunks. The tree leaves it whole.",
    "Ring: every rank sends a chunk. Tree: ranks 1 and 3 send their whole tensors.",
    "Ring: every rank sends a chunk. Tree: rank 2 sends, and rank 0 has the sum.",
    "Ring: each rank has one finished chunk. Tree: the sum goes back to rank 2.",
    "Ring: finished chunks go on. Tree: the last two ranks hear the sum. It is done.",
    "Ring: finished chunks go on. The tree was done after 4 steps.",
    "Ring: done after 6 steps, but each sent only a quarter of the tensor.",
)


# What each rank holds before and after

# Where an operation has its input; the others have theirs first.
INPUT = {"scatter": 1, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def movements(*workers: Callable, world_size: int = 4) -> Drawing:
    """Launch each worker, and draw what every rank held before and after its call.

    A worker has the name of the operation that it calls, and returns what its rank holds
    afterwards. Beside each panel stands the call, as it is in the worker's source.
    """
    reports = [launch(before_and_after, world_size, worker) for worker in workers]
    words_at = max(_width(report) for report in reports) + GAP
    panels = [
        _panel(report, worker.__name__, _call(worker), words_at)
        for report, worker in zip(reports, workers, strict=True)
    ]
    height = sum(panel.height + GAP for panel in panels) - GAP
    names = ", ".join(worker.__name__ for worker in workers)
    text = "\n\n".join(panel.text for panel in panels)
    alt = f"What each rank holds before and after {names}"
    drawing = Drawing(max(panel.width for panel in panels), height, text, alt)
    top = 0.0
    for panel in panels:
        moved = "".join(panel.parts)
        drawing.parts.append(f"<g transform='translate(0 {top:g})'>{moved}</g>")
        top += panel.height + GAP
    return drawing


def before_and_after(rank: int, world_size: int, worker: Callable) -> tuple:
    """Look on while `worker` makes its call: what it gives to it, and what it returns."""
    name, given = worker.__name__, []
    original = getattr(dist, name)

    def call(*args: object, **kwargs: object) -> object:
        given.append(copy.deepcopy(args[INPUT.get(name, 0)]))
        return original(*args, **kwargs)

    setattr(dist, name, call)
    after = worker(rank, world_size)
    setattr(dist, name, original)
    return given[0], after


def _call(worker: Callable) -> str:
    """The line of a worker that calls its collective."""
    lines = map(str.strip, inspect.getsource(worker).split("\n"))
    return next(line for line in lines if line.startswith("dist."))


def _panel(report: Report, name: str, call: str, words_at: float) -> Drawing:
    """Draw what each rank held, of a launch of `before_and_after`.

    A value that a single rank held before keeps the colour of that rank in both columns, and
    all others are grey. The call stands at `words_at` pixels.
    """
    before, after = _columns(report)
    owners = _owners(before)
    middle = LEFT + SIDE * len(before[0])
    right = middle + ARROW
    height = TOP + ROW * report.world_size
    rows = [
        f"rank {rank}  {_as_text(before[rank])} → {_as_text(after[rank])}"
        for rank in range(report.world_size)
    ]
    alt = f"{name}: what each rank holds before and after"
    drawing = Drawing(words_at + 8 * LETTERS, height, "\n".join([call, *rows]), alt)
    drawing.label(LEFT, 17, "before", 14, anchor="start")
    drawing.label(right, 17, "after", 14, anchor="start")
    for rank in range(report.world_size):
        y = TOP + ROW * rank
        drawing.label(8, y + 16, f"rank {rank}", 14, tone(rank).text, "start", "bold")
        _draw_cells(drawing, LEFT, y, before[rank], owners)
        _draw_cells(drawing, right, y, after[rank], owners)
        for other in _sources(after[rank], owners, report.world_size):
            line, ink = y + HEIGHT / 2, tone(other).text
            begin = TOP + ROW * other + HEIGHT / 2
            drawing.line(middle + 4, begin, right - 8, line, ink, 1.3, arrow=True)
    drawing.label((middle + right) / 2 - 2, 17, name, 13)
    for i, line in enumerate(textwrap.wrap(call, LETTERS)):
        y = TOP + 16 + LINE * i
        drawing.label(words_at, y, line, 14, anchor="start", weight="bold")
    return drawing


def _width(report: Report) -> int:
    before, after = _columns(report)
    return LEFT + SIDE * len(before[0]) + ARROW + SIDE * len(after[0]) + MARGIN


def _columns(report: Report) -> list[list[list[int | None]]]:
    """The numbers of each rank before and after, padded with None to equal lengths."""
    columns = []
    for side in zip(*report.results, strict=True):
        lists = [[held] if torch.is_tensor(held) else held or [] for held in side]
        rows = [[n for tensor in tensors for n in tensor.tolist()] for tensors in lists]
        longest = max(map(len, rows))
        columns.append([row or [None] * longest for row in rows])
    return columns


def _owners(before: Sequence[Sequence]) -> dict[int, int]:
    """The rank that alone held a value at the start, by value; none for shared values."""
    holders: dict[int, set[int]] = {}
    for rank, values in enumerate(before):
        for value in values:
            holders.setdefault(value, set()).add(rank)
    return {value: ranks.pop() for value, ranks in holders.items() if len(ranks) == 1}


def _sources(after: Sequence, owners: dict[int, int], ranks: int) -> set[int]:
    """The ranks whose numbers are in these; in a sum, which nobody had, those of all."""
    values = [value for value in after if value is not None]
    is_sum = any(value not in owners for value in values)
    return set(range(ranks)) if is_sum else {owners[value] for value in values}


def _draw_cells(drawing: Drawing, x: float, y: float, values: Sequence, owners: dict) -> None:
    for i, value in enumerate(values):
        left = x + SIDE * i
        if value is None:
            drawing.box(left, y, SIDE - 4, HEIGHT, FAINT, "#ffffff", 1, "3 3")
            continue
        owner = owners.get(value)
        fill, ink = ("#d9d9d9", INK) if owner is None else (tone(owner).fill, tone(owner).on)
        drawing.box(left, y, SIDE - 4, HEIGHT, INK, fill, 1)
        drawing.label(left + SIDE / 2 - 2, y + 16, value, 14, ink, weight="bold")


def _as_text(values: Sequence) -> str:
    return "[" + ", ".join("·" if value is None else str(value) for value in values) + "]"


# The ring, step by step


def ring_film(
    rank: int, world_size: int, all_reduce: Callable = ring_all_reduce
) -> list[int]:
    """Look on while the ring sums chunks: a frame before each message, and one at the end.

    A chunk of rank r begins as 10 to the power r, so its digits say whose parts are in it.
    """
    tensor, original, sent = torch.full((world_size,), 10**rank), dist.isend, 0

    def look() -> None:
        held = {f"chunk {i}": _parts(number) for i, number in enumerate(tensor.tolist())}
        frame(_ring_says(sent, world_size - 1), held)

    def isend(*args: object, **kwargs: object) -> object:
        nonlocal sent
        look()
        sent += 1
        return original(*args, **kwargs)

    dist.isend = isend
    all_reduce(tensor)
    dist.isend = original
    look()
    return tensor.tolist()


def _parts(number: int) -> list[int]:
    return [rank for rank, digit in enumerate(reversed(str(number))) if digit != "0"]


def _ring_says(sent: int, each: int) -> str:
    """The sentence under a frame, after `sent` messages of `each` in both halves."""
    if sent == 0:
        return (
            "Every rank has its own part of each chunk. All ranks need the sum of all parts."
        )
    if sent <= each:
        what = "every rank sends one chunk to the next rank, which adds it to its own"
        return f"Add up, {sent} of {each}: {what}."
    what = "a finished chunk goes on to the next rank, which keeps it"
    return f"Hand out, {sent - each} of {each}: {what}."


# The tree beside it


def tree_film(rank: int, world_size: int) -> list[int]:
    """A step of the ring and a level of the tree at a time, on four ranks, as a film.

    Up the tree the upper half of each pair sends its whole tensor, and down it is sent one.
    """
    ring, tree = torch.full((4,), 10**rank), torch.tensor([10**rank])
    original, says, held, came = dist.isend, iter(TREE_SAYS), {}, {}
    levels = iter([(1, True), (2, True), (2, False), (1, False)])

    def look() -> None:
        now = {f"ring {i}": _parts(number) for i, number in enumerate(ring.tolist())}
        changed = [slot for slot in now if held and now[slot] != held[slot]]
        came.update({slot: ((rank - 1) % 4, slot) for slot in changed})
        held.update(now, tree=_parts(tree.item()))
        frame(next(says), held, came)
        came.clear()

    def climb(apart: int, is_up: bool) -> None:
        """Send or receive the whole tensor, if it is this rank's turn."""
        place = rank % (2 * apart)
        peer = rank + apart if place == 0 else rank - apart
        if place not in (0, apart):
            return
        if (place == apart) == is_up:
            dist.send(tree, peer)
            return
        incoming = torch.empty_like(tree)
        dist.recv(incoming, peer)
        tree.copy_(tree + incoming if is_up else incoming)
        came["tree"] = peer, "tree"

    def isend(*args: object) -> object:
        look()
        if level := next(levels, None):
            climb(*level)
        return original(*args)

    dist.isend = isend
    ring_all_reduce(ring)
    dist.isend = original
    look()
    return [*ring.tolist(), tree.item()]


# Times


def time_methods(
    rank: int,
    world_size: int,
    methods: list[Callable[[torch.Tensor], None]],
    sizes: list[int],
    turns: int = 5,
) -> dict[tuple[str, int], float]:
    """The least seconds of each method on a tensor of each size (bytes), by name and size.

    A time lasts until the slowest rank is done. Small sizes are timed five times as often,
    because a disturbance weighs most there.
    """
    least = {}
    for size in sizes:
        tensor = torch.full((size // 4,), 0.0)  # of float32, 4 bytes each
        actions = {method.__name__: _until_all_have(method, tensor) for method in methods}
        seconds = in_turns(actions, turns * max(1, min(5, 2**25 // size)), warm_up=1)
        least |= {(name, size): min(taken) for name, taken in seconds.items()}
    return least


def _until_all_have(method: Callable, tensor: torch.Tensor) -> Callable[[], None]:
    def action() -> None:
        method(tensor)
        dist.barrier()

    return action


def fit_link(sizes: list[int], seconds: list[float], world_size: int) -> Link:
    """Fit the ring's formula to measured times by least squares of the relative errors."""
    steps = 2 * (world_size - 1)
    sent = [steps / world_size * size for size in sizes]
    design = torch.tensor([[steps, nbytes] for nbytes in sent], dtype=torch.float64)
    weighted = design / torch.tensor(seconds, dtype=torch.float64)[:, None]
    ones = torch.ones(len(seconds), 1, dtype=torch.float64)
    latency, per_byte = torch.linalg.lstsq(weighted, ones).solution.flatten().tolist()
    return Link(latency, 1 / per_byte)


def draw_times(times: Mapping[tuple[str, int], float], ranks: int, link: Link) -> Plot:
    """The times of `time_methods` as marks, and two formulas with this link as lines."""
    names = list(dict.fromkeys(name for name, _ in times))
    sizes = sorted({size for _, size in times})
    measured = {name: (sizes, [times[name, size] for size in sizes]) for name in names}
    formulas = {"ring, by formula": ring_seconds, "naive, by formula": naive_seconds}
    lines = {
        name: (sizes, [seconds(size, ranks, link) for size in sizes])
        for name, seconds in formulas.items()
    }
    return curves(measured, lines, "bytes", "seconds")


def ring_or_tree(link: Link) -> Table:
    """Milliseconds of both on 8, 64 and 1,024 ranks, for three sizes of the tensor."""
    rows = []
    for ranks in (8, 64, 1024):
        for name, cost in {"ring": ring_seconds, "tree": tree_seconds}.items():
            seconds = (cost(size, ranks, link) for size in (1e5, 1e7, 1e9))
            rows.append([ranks, name, *(f"{1e3 * t:.2f} ms" for t in seconds)])
    return Table(["ranks", "", "100 kB", "10 MB", "1 GB"], rows)
