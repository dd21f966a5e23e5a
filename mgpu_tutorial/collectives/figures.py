"""Pictures and times for the notebook on collectives; no lesson is in here."""

import inspect
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from mgpu_tutorial.collectives.ring import ring_all_reduce
from mgpu_tutorial.lab import Table, frame, launch
from mgpu_tutorial.lab.colours import tone
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.measure import in_turns
from mgpu_tutorial.shared.cost_model.links import Link, ring_seconds, tree_seconds

SIDE, HEIGHT, ROW, TOP, LEFT, ARROW, PANEL = 38, 22, 25, 46, 66, 116, 164  # pixels

# The sentence of each frame, and the tree's messages that follow it, from rank to rank.
TREE = (
    ("The ring cuts each rank's tensor into four chunks. The tree leaves it whole.", "10 32"),
    ("Ring: every rank sends a chunk. Tree: ranks 1 and 3 send their whole tensors.", "20"),
    ("Ring: every rank sends a chunk. Tree: rank 2 sends, and rank 0 has the sum.", "02"),
    ("Ring: each rank has one finished chunk. Tree: the sum goes back to rank 2.", "01 23"),
    ("Ring: finished chunks go on. Tree: the last two ranks hear the sum. It is done.", ""),
    ("Ring: finished chunks go on. The tree was done after 4 steps.", ""),
    ("Ring: done after 6 steps, but each sent only a quarter of the tensor.", ""),
)

# What each rank holds before and after

# Where an operation has its input; the others have theirs first.
INPUT = {"scatter": 1, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}


def movements(*workers: Callable) -> Drawing:
    """Launch each worker on four ranks, and draw what they held before and after its call.

    A worker has the name of the operation that it calls, and returns what its rank holds
    afterwards. The tens of a number say whose it was, from 10 for rank 0 to 40 for rank 3;
    a larger number is a sum.
    """
    names = ", ".join(worker.__name__ for worker in workers)
    width, alt = LEFT + 8 * SIDE + ARROW, f"What each rank holds before and after {names}"
    drawing, said = Drawing(width, PANEL * len(workers), "", alt), []
    for i, worker in enumerate(workers):
        lines = map(str.strip, inspect.getsource(worker).split("\n"))
        call = next(line for line in lines if line.startswith("dist."))
        columns = []
        for rows in zip(*launch(before_and_after, 4, worker).results, strict=True):
            longest = max(map(len, rows))
            columns.append([row or [None] * longest for row in rows])
        _panel(drawing, PANEL * i, call, *columns)
        held = zip(*columns, strict=True)
        rows = [f"rank {r}  {_text(a)} → {_text(b)}" for r, (a, b) in enumerate(held)]
        said.append("\n".join([call, *rows]))
    drawing.text = "\n\n".join(said)
    return drawing


def before_and_after(rank: int, world_size: int, worker: Callable) -> tuple:
    """Look on while `worker` makes its call: the numbers it gives, and those it returns."""
    name, given = worker.__name__, []
    original = getattr(dist, name)

    def call(*args: object, **kwargs: object) -> object:
        given.append(_numbers(args[INPUT.get(name, 0)]))
        return original(*args, **kwargs)

    setattr(dist, name, call)
    after = worker(rank, world_size)
    setattr(dist, name, original)
    return given[0], _numbers(after)


def _numbers(held: torch.Tensor | list[torch.Tensor] | None) -> list[int]:
    """The numbers in a tensor or in a list of them; none in None."""
    tensors = [held] if torch.is_tensor(held) else held or []
    return [number for tensor in tensors for number in tensor.tolist()]


def _panel(drawing: Drawing, top: float, call: str, before: list, after: list) -> None:
    """Each rank's numbers in two columns, and an arrow from each rank that they come from."""
    middle = LEFT + SIDE * len(before[0])
    right = middle + ARROW
    drawing.label(8, top + 17, call, 14, anchor="start", weight="bold")
    drawing.label(LEFT, top + 38, "before", 14, anchor="start")
    drawing.label(right, top + 38, "after", 14, anchor="start")
    for rank in range(4):
        y = top + TOP + ROW * rank
        drawing.label(8, y + 16, f"rank {rank}", 14, tone(rank).text, "start", "bold")
        _cells(drawing, LEFT, y, before[rank])
        _cells(drawing, right, y, after[rank])
        values = [value for value in after[rank] if value]
        is_sum = any(value > 50 for value in values)
        for other in range(4) if is_sum else {value // 10 - 1 for value in values}:
            begin, end = (top + TOP + ROW * r + HEIGHT / 2 for r in (other, rank))
            ink = tone(other).text
            drawing.line(middle + 4, begin, right - 8, end, ink, 1.3, arrow=True)


def _cells(drawing: Drawing, x: float, y: float, values: list) -> None:
    for i, value in enumerate(values):
        left = x + SIDE * i
        if value is None:
            drawing.box(left, y, SIDE - 4, HEIGHT, FAINT, "#ffffff", 1, "3 3")
            continue
        own = tone(value // 10 - 1)
        fill, ink = ("#d9d9d9", INK) if value > 50 else (own.fill, own.on)
        drawing.box(left, y, SIDE - 4, HEIGHT, INK, fill, 1)
        drawing.label(left + SIDE / 2 - 2, y + 16, value, 14, ink, weight="bold")


def _text(values: list) -> str:
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
    steps, held, came, isend = iter(TREE), {}, {}, dist.isend

    def look(*message: object) -> object:
        """Show what is held, take the tree's next level, and go on with the ring."""
        now = {f"ring {i}": _parts(number) for i, number in enumerate(ring.tolist())}
        left = (rank - 1) % 4
        came.update({slot: (left, slot) for slot in now if held and now[slot] != held[slot]})
        held.update(now, tree=_parts(tree.item()))
        says, messages = next(steps)
        frame(says, held, came)
        came.clear()
        for source, target in (map(int, pair) for pair in messages.split()):
            if rank == source:
                dist.send(tree, target)
            elif rank == target:
                incoming = torch.empty_like(tree)
                dist.recv(incoming, source)
                tree.copy_(tree + incoming if source > target else incoming)
                came["tree"] = source, "tree"
        return isend(*message) if message else None

    dist.isend = look
    ring_all_reduce(ring)
    dist.isend = isend
    look()
    return [*ring.tolist(), tree.item()]


# Times


def race(*methods: Callable[[torch.Tensor], None]) -> Table:
    """The least milliseconds of each method on four ranks, until the slowest rank is done."""
    least = launch(_least, 4, methods, timeout=60).results[0]
    rows = [[f"{size:,}", *(round(1e3 * t, 2) for t in least[size])] for size in least]
    return Table(["bytes", *(f"{method.__name__}, ms" for method in methods)], rows)


def _least(rank: int, world_size: int, methods: tuple) -> dict[int, list[float]]:
    def until_all_have(method: Callable, tensor: torch.Tensor) -> None:
        method(tensor)
        dist.barrier()

    least = {}
    for size in (4_000, 400_000, 20_000_000):
        tensor = torch.zeros(size // 4)
        actions = {method: partial(until_all_have, method, tensor) for method in methods}
        seconds = in_turns(actions, 4 if size > 1e6 else 20, warm_up=1)
        least[size] = [min(taken) for taken in seconds.values()]
    return least


def ring_or_tree(link: Link) -> Table:
    """Milliseconds of both on 8, 64 and 1,024 ranks, for three sizes of the tensor."""
    rows = []
    for ranks in (8, 64, 1024):
        for name, cost in {"ring": ring_seconds, "tree": tree_seconds}.items():
            seconds = (cost(size, ranks, link) for size in (1e5, 1e7, 1e9))
            rows.append([ranks, name, *(f"{1e3 * t:.2f} ms" for t in seconds)])
    return Table(["ranks", "", "100 kB", "10 MB", "1 GB"], rows)
