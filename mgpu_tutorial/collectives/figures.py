"""Pictures and times for the notebook on collectives; no lesson is in here."""

import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from mgpu_tutorial.collectives.ring import naive_seconds
from mgpu_tutorial.lab import Table, launch
from mgpu_tutorial.lab.colours import tone
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.measure import in_turns
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.shared.cost_model.links import Link, ring_seconds

SIDE, HEIGHT, ROW, TOP, LEFT = 38, 22, 25, 24, 66
ARROW, MARGIN, LINE, LETTERS = 116, 10, 18, 38
GAP = 14


# What each rank holds before and after


def movements(uses: Mapping[Callable, str], world_size: int = 4) -> Drawing:
    """Run each worker, and draw what every rank held before and after it, a panel each.

    Beside each panel stands the call, as it is in the worker's source, and its use.
    """
    reports = [launch(worker, world_size) for worker in uses]
    words_at = max(_width(report) for report in reports) + GAP
    panels = [
        before_after(report, worker.__name__, (_call(worker), use), words_at)
        for report, (worker, use) in zip(reports, uses.items(), strict=True)
    ]
    height = sum(panel.height + GAP for panel in panels) - GAP
    names = ", ".join(worker.__name__ for worker in uses)
    text = "\n\n".join(panel.text for panel in panels)
    alt = f"What each rank holds before and after {names}"
    drawing = Drawing(max(panel.width for panel in panels), height, text, alt)
    top = 0.0
    for panel in panels:
        moved = "".join(panel.parts)
        drawing.parts.append(f"<g transform='translate(0 {top:g})'>{moved}</g>")
        top += panel.height + GAP
    return drawing


def _call(worker: Callable) -> str:
    """The line of a worker that calls its collective."""
    lines = map(str.strip, inspect.getsource(worker).split("\n"))
    return next(line for line in lines if line.startswith("dist."))


def before_after(report: Report, name: str, words: Sequence[str], words_at: float) -> Drawing:
    """Draw what each rank held, of a launch whose worker returns (before, after).

    Each of the two is a tensor, a list of tensors, or None, which draws empty places. A
    value that a single rank held before keeps the colour of that rank in both columns, and
    all others are grey. `words` stand at `words_at` pixels, the first paragraph in bold.
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
    drawing = Drawing(words_at + 8 * LETTERS, height, "\n".join([*words, *rows]), alt)
    drawing.label(LEFT, 17, "before", 14, anchor="start")
    drawing.label(right, 17, "after", 14, anchor="start")
    for rank in range(report.world_size):
        y = TOP + ROW * rank
        drawing.label(8, y + 16, f"rank {rank}", 14, tone(rank).text, "start", "bold")
        _draw_cells(drawing, LEFT, y, before[rank], owners)
        line = y + HEIGHT / 2
        drawing.line(middle + 4, line, right - 8, line, arrow=True)
        _draw_cells(drawing, right, y, after[rank], owners)
    drawing.label((middle + right) / 2 - 2, 17, name, 13)
    _write(drawing, words, words_at)
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


def _write(drawing: Drawing, words: Sequence[str], x: float) -> None:
    """The paragraphs beside the picture, wrapped."""
    y = TOP + 16
    for number, paragraph in enumerate(words):
        for line in textwrap.wrap(paragraph, LETTERS):
            weight = "normal" if number else "bold"
            drawing.label(x, y, line, 14, anchor="start", weight=weight)
            y += LINE
        y += 6


def _as_text(values: Sequence) -> str:
    return "[" + ", ".join("·" if value is None else str(value) for value in values) + "]"


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


def compare_with_model(
    sizes: list[int],
    ring: list[float],
    naive: list[float],
    gloo: list[float],
    world_size: int,
    link: Link,
) -> Table:
    """Measured seconds beside those of the formulas: a row for each size (bytes)."""
    rows = []
    for i, size in enumerate(sizes):
        ring_model = ring_seconds(size, world_size, link)
        naive_model = naive_seconds(size, world_size, link)
        ratios = naive[i] / ring[i], naive_model / ring_model, gloo[i] / ring[i]
        figures = [1e3 * ring[i], 1e3 * ring_model, *ratios]
        rows.append([f"{size >> 10:,} KiB", *(f"{figure:.2f}" for figure in figures)])
    header = ["ring ms", "predicted", "naive / ring", "predicted", "gloo / ring"]
    return Table(["", *header], rows)
