"""Pictures and times for the notebook on collectives; no lesson is in here."""

import inspect
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mgpu_tutorial.collectives.ring import ring_all_reduce
from mgpu_tutorial.lab import Table, frame, launch
from mgpu_tutorial.lab.colours import tone
from mgpu_tutorial.lab.draw.drawing import INK, Drawing
from mgpu_tutorial.lab.measure import in_turns

SIDE, HEIGHT, ROW, TOP, LEFT, ARROW, PANEL = 38, 22, 25, 46, 66, 116, 164  # pixels

# Where an operation has its input; the others have theirs first.
INPUT = {"scatter": 1, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}

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


def movements(*workers: Callable) -> Drawing:
    """Launch each worker on four ranks, and draw what they held before and after its call.

    A worker has the name of the operation that it calls, and returns what its rank holds
    afterwards. The tens of a number say whose it was, from 10 for rank 0 to 40 for rank 3;
    a larger number is a sum over all.
    """
    names = ", ".join(worker.__name__ for worker in workers)
    width, alt = LEFT + 8 * SIDE + ARROW, f"What each rank holds before and after {names}"
    drawing = Drawing(width, PANEL * len(workers), "", alt)
    for i, worker in enumerate(workers):
        call = re.search(r"dist\..*", inspect.getsource(worker))[0]
        rows, top = launch(before_and_after, 4, worker).results, PANEL * i + TOP
        middle = LEFT + SIDE * max(len(before) for before, _ in rows)
        right = middle + ARROW
        drawing.label(8, top - 29, call, 14, anchor="start", weight="bold")
        drawing.label(LEFT, top - 8, "before", 14, anchor="start")
        drawing.label(right, top - 8, "after", 14, anchor="start")
        drawing.text += f"\n\n{call}"
        for rank, (before, after) in enumerate(rows):
            y, sources = top + ROW * rank, set()
            drawing.label(8, y + 16, f"rank {rank}", 14, tone(rank).text, "start", "bold")
            drawing.text += f"\nrank {rank}  {before} → {after}"
            for x, values in ((LEFT, before), (right, after)):
                for value in values:
                    owners = range(4) if value > 50 else [value // 10 - 1]
                    own = tone(owners[0])
                    fill, ink = (own.fill, own.on) if len(owners) == 1 else ("#d9d9d9", INK)
                    drawing.box(x, y, SIDE - 4, HEIGHT, INK, fill, 1)
                    drawing.label(x + SIDE / 2 - 2, y + 16, value, 14, ink, weight="bold")
                    x += SIDE
                    sources |= set(owners) if values is after else set()
            for other in sources:
                begin, end = top + ROW * other + HEIGHT / 2, y + HEIGHT / 2
                ink = tone(other).text
                drawing.line(middle + 4, begin, right - 8, end, ink, 1.3, arrow=True)
    drawing.text = drawing.text.strip()
    return drawing


def before_and_after(rank: int, world_size: int, worker: Callable) -> tuple:
    """Look on while `worker` makes its call: the numbers it gives, and those it returns."""
    name, given = worker.__name__, []
    original = getattr(dist, name)

    def call(*args: object, **kwargs: object) -> object:
        given.extend(_numbers(args[INPUT.get(name, 0)]))
        return original(*args, **kwargs)

    setattr(dist, name, call)
    after = worker(rank, world_size)
    return given, _numbers(after)


def _numbers(held: torch.Tensor | list[torch.Tensor] | None) -> list[int]:
    if held is None:
        return []
    return torch.cat(held if isinstance(held, list) else [held]).tolist()


def ring_film(rank: int, world_size: int, all_reduce: Callable = ring_all_reduce) -> None:
    """Look on while a ring sums chunks: a frame at first, and one for each message received.

    A chunk of rank r begins as 2 to the power r and the chunk's number. So a message says
    whose parts of which chunk are in it, in whatever way it is sent and received. Raises
    ValueError where the ring has not made the sum.
    """
    each, arrived = world_size - 1, []
    numbers = [number for chunk in range(world_size) for number in (2**rank, chunk)]
    tensor = torch.tensor(numbers)
    dist.irecv = c10d.irecv = _watched(c10d.irecv, arrived)  # recv and batches call it too
    all_reduce(tensor)
    chunks = [_parts(chunk) for chunk in tensor.split(2)]
    is_summed = chunks == [(i, set(range(world_size))) for i in range(world_size)]
    if not is_summed or len(arrived) != 2 * each:
        raise ValueError(
            f"no film yet: a ring of {world_size} leaves the sum on every rank, and each "
            f"receives {2 * each} messages for it. build(ring_all_reduce) says what differs."
        )
    add = "every rank sends one chunk to the next rank, which adds it to its own."
    keep = "a finished chunk goes on to the next rank, which keeps it."
    says = [f"Add up, {step} of {each}: {add}" for step in range(1, world_size)]
    says += [f"Hand out, {step} of {each}: {keep}" for step in range(1, world_size)]
    held = {f"chunk {i}": {rank} for i in range(world_size)}
    first = "Every rank has its own part of each chunk. All ranks need the sum of all parts."
    frame(first, held)
    left = (rank - 1) % world_size
    for sentence, (sender, (chunk, parts)) in zip(says, arrived, strict=True):
        held[f"chunk {chunk}"] |= parts
        frame(
            sentence,
            held,
            {f"chunk {chunk}": (left if sender is None else sender, f"chunk {chunk}")},
        )


class _Watched:
    """A work object that notes, once it was waited for, from whom what has arrived."""

    def __init__(self, work: object, came: list, sender: int, buffer: torch.Tensor) -> None:
        self._work, self._came, self._sender, self._buffer = work, came, sender, buffer

    def wait(self, *args: object, **kwargs: object) -> object:
        result = self._work.wait(*args, **kwargs)
        self._came[:] = self._sender, _parts(self._buffer)
        return result

    def __getattr__(self, name: str) -> object:
        return getattr(self._work, name)


def _watched(irecv: Callable, arrived: list[list]) -> Callable:
    """The same call, which makes room in `arrived` for what will have come."""
    signature = inspect.signature(irecv)

    def call(*args: object, **kwargs: object) -> _Watched:
        given = signature.bind(*args, **kwargs).arguments
        sender = given.get("src", given.get("group_src"))
        arrived.append([sender, (0, set())])
        return _Watched(irecv(*args, **kwargs), arrived[-1], sender, given["tensor"])

    return call


def _parts(chunk: torch.Tensor) -> tuple[int, set[int]]:
    """Which chunk this is, and whose parts are in it: read off its two numbers."""
    parts, numbers = [*chunk.flatten().tolist(), 0, 0][:2]
    ranks = {rank for rank in range(parts.bit_length()) if parts >> rank & 1}
    return numbers // max(len(ranks), 1), ranks


def tree_film(rank: int, world_size: int) -> None:
    """On four ranks, a step of the ring and a level of the tree at a time, as a film."""
    slots = ["ring 0", "ring 1", "ring 2", "ring 3", "tree"]
    held, came = {slot: torch.tensor(10**rank) for slot in slots}, {}
    for step, (says, tree) in enumerate(TREE):
        frame(says, {slot: _digits(held[slot]) for slot in slots}, came)
        moves = [(r, (r + 1) % 4, f"ring {(r - step) % 4}") for r in range(4) if step < 6]
        moves += [(int(source), int(target), "tree") for source, target in tree.split()]
        works = [dist.isend(held[slot], to) for source, to, slot in moves if source == rank]
        came = {slot: (source, slot) for source, to, slot in moves if to == rank}
        for slot, (source, _) in came.items():
            incoming = torch.empty_like(held[slot])
            dist.recv(incoming, source)
            adds = source > rank if slot == "tree" else step < 3
            held[slot] = held[slot] + incoming if adds else incoming
        for work in works:
            work.wait()


def _digits(number: torch.Tensor) -> list[int]:
    """The ranks whose parts are in a sum of powers of ten."""
    digits = reversed(str(number.item()))
    return [rank for rank, digit in enumerate(digits) if digit != "0"]


def by_size(
    ways: Mapping[str, Callable[[float, int, float], float]], ranks: int, latency: float
) -> Drawing:
    """The seconds of each way for 1 kB to 10 GB, and which is the fastest where.

    A way is a function of bytes, ranks and latency. Both axes are logarithmic, and the same
    for all settings, so that what moves is the network's doing.
    """
    low, high, fast, slow = 3, 10, -5, 1  # powers of ten: bytes, and seconds
    left, top, x, y = 78, 12, 70, 34  # pixels, and of a power of ten
    right, base = left + x * (high - low), top + y * (slow - fast)

    def cost(name: str, power: float) -> float:
        return ways[name](10**power, ranks, latency)

    def fastest(power: float) -> str:
        return min(ways, key=lambda name: cost(name, power))

    def change(below: float, above: float) -> float:
        """Where the fastest way is another, by halving."""
        for _ in range(30):
            middle = (below + above) / 2
            same = fastest(middle) == fastest(below)
            below, above = (middle, above) if same else (below, middle)
        return below

    dashes = "", " stroke-dasharray='8 4'"
    grid = [low + i / 20 for i in range(20 * (high - low) + 1)]
    changes = [change(a, b) for a, b in pairwise(grid) if fastest(a) != fastest(b)]
    edges = [low, *changes, high]
    spans = [(a, b, fastest((a + b) / 2)) for a, b in pairwise(edges)]
    runs = [f"{way} up to {_decimal(10**b)}" for _, b, way in spans[:-1]]
    each = ", ".join(f"{1e3 * cost(name, 7):.3g} ms by {name}" for name in ways)
    says = (
        f"{ranks:,} ranks, {1e6 * latency:g} µs: the fastest is "
        f"{', '.join([*runs, ('then ' if runs else '') + spans[-1][2]])}. "
        f"10 MB take {each}."
    )
    drawing = Drawing(right + 80, base + 74, says, says)
    for power in range(low, high + 1):
        at = left + x * (power - low)
        drawing.line(at, top, at, base, "#dddddd", 1)
    for power in range(fast, slow + 1):
        at = base - y * (power - fast)
        drawing.line(left, at, right, at, "#dddddd", 1)
        unit = "µs" if power < -3 else "ms" if power < 0 else "s"
        many = 10 ** (power + {"µs": 6, "ms": 3, "s": 0}[unit])
        drawing.label(left - 8, at + 4, f"{many:g} {unit}", 12, anchor="end")
    at = left + x * (7 - low)
    drawing.line(at, top, at, base, INK, 1, "2 3")
    for i, name in enumerate(ways):
        places = []
        for power in grid[::4]:
            tall = y * (math.log10(cost(name, power)) - fast)
            if 0 <= tall <= base - top:
                places.append((left + x * (power - low), base - tall))
        corners = " ".join(f"{across:g},{down:.1f}" for across, down in places)
        drawing.parts.append(
            f"<polyline points='{corners}' fill='none' stroke='{tone(i).fill}' "
            f"stroke-width='2.6'{dashes[i % 2]}/>"
        )
        end, down = places[-1]
        drawing.label(end + 6, down + 4, name, 14, tone(i).text, "start", "bold")
    for a, b, way in spans:
        i = list(ways).index(way)
        begin, wide = left + x * (a - low), x * (b - a)
        drawing.box(begin, base + 30, wide, 22, "#ffffff", tone(i).fill, 1, radius=0)
        if wide > 10 * len(way):
            drawing.label(begin + wide / 2, base + 45, way, 13, tone(i).on, weight="bold")
    drawing.label(left - 8, base + 45, "fastest", 12, anchor="end")
    for power in changes:
        at, down = (
            left + x * (power - low),
            y * (math.log10(cost(fastest(power), power)) - fast),
        )
        drawing.line(at, base - down, at, base + 52, INK, 1.2)
        drawing.box(at - 4, base - down - 4, 8, 8, INK, INK, 1, radius=4)
        drawing.label(at, base + 67, _decimal(10**power), 13, weight="bold")
    for power in range(low, high + 1):
        at = left + x * (power - low)
        drawing.label(at, base + 18, _decimal(10**power), 12, halo=True)
    drawing.label(left - 36, base + 18, "tensor", 12, anchor="end")
    return drawing


def _decimal(nbytes: float) -> str:
    """Bytes in powers of a thousand, to two digits."""
    power = min(math.floor(math.log10(nbytes) + 1e-9) // 3, 3)
    number = float(f"{nbytes / 1000**power:.2g}")
    return f"{number:g} {('B', 'kB', 'MB', 'GB')[power]}"


def race(*methods: Callable[[torch.Tensor], None]) -> Table:
    """The least milliseconds of each method on four ranks, until the slowest rank is done."""
    rows = launch(turns, 4, methods, timeout=60).results[0]
    return Table(["bytes", *(f"{method.__name__}, ms" for method in methods)], rows)


def turns(rank: int, world_size: int, methods: tuple) -> list[list]:
    """A row for each size: its bytes, and the least milliseconds of each method."""

    def until_all_have(method: Callable, tensor: torch.Tensor) -> None:
        method(tensor)
        dist.barrier()

    rows = []
    for size in (4_000, 400_000, 20_000_000):
        tensor = torch.zeros(size // 4)
        actions = {method: partial(until_all_have, method, tensor) for method in methods}
        taken = in_turns(actions, 4 if size > 1e6 else 20, warm_up=1).values()
        rows.append([f"{size:,}", *(round(1e3 * min(seconds), 2) for seconds in taken)])
    return rows
