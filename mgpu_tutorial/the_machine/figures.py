"""Apparatus, not the lesson: the roads between devices, ring and tree, tables of prices."""

import math
from collections import Counter
from collections.abc import Callable, Mapping

from mgpu_tutorial.instruments.price.machine import machine_of
from mgpu_tutorial.instruments.price.picture import MESSAGES, OTHERS, PRODUCTS, bars, phases
from mgpu_tutorial.instruments.price.pricing import Priced, tape_all
from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.colours import tone
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.draw.film import Film
from mgpu_tutorial.lab.table import formatted
from mgpu_tutorial.shared.cost_model import links
from mgpu_tutorial.shared.cost_model.links import Link

H100S = machine_of("8 x H100")


def metric(nbytes: float) -> str:
    """Bytes in the units of data sheets, which count in thousands."""
    power = min(int(math.log10(nbytes) + 1e-9) // 3, 3)
    return f"{nbytes / 1000**power:.3g} {('B', 'kB', 'MB', 'GB')[power]}"


SIZES = [10 ** (3 + i / 8) for i in range(57)]  # bytes, 1 kB to 10 GB
PLACES = {2: "one node", 4: "one node", 8: "one node", 16: "2 nodes"}
PLACES |= {128: "16 nodes", 1024: "128 nodes"}  # of eight H100s, by their number


def ways(ranks: int) -> dict[str, Callable[[float], float]]:
    """Seconds of an all-reduce by its bytes, for each way to do it on so many H100s."""
    nodes = -(-ranks // 8)
    link = H100S.between if nodes > 1 else H100S.inside
    size = nodes, min(ranks, 8), H100S.inside, H100S.between
    found = {
        "ring": lambda nbytes: links.flat_ring_seconds(nbytes, *size),
        "tree": lambda nbytes: links.tree_seconds(nbytes, ranks, link),
    }
    if nodes > 1:
        found["by nodes"] = lambda nbytes: links.hierarchical_seconds(nbytes, *size)
    return found


def ring_or_tree() -> Film:
    """A frame for each number of GPUs: what an all-reduce takes, by its size and its way."""
    return Film([_frame(ranks, place) for ranks, place in PLACES.items()])


LEFT, TOP, WIDE, HIGH = 78, 44, 560, 250  # pixels
LOOKS = {"ring": (tone(0).text, ""), "tree": (tone(1).text, "6 4")}
LOOKS |= {"by nodes": (tone(2).text, "2 3")}


def _frame(ranks: int, place: str) -> Drawing:
    found = ways(ranks)
    winners = [min(found, key=lambda name: found[name](size)) for size in SIZES]
    ends = [i for i, (a, b) in enumerate(zip(winners, winners[1:], strict=False)) if a != b]
    spans = zip([0, *(i + 1 for i in ends)], [*ends, len(SIZES) - 1], strict=True)
    said = [
        f"{winners[first]} {'from' if first else 'up to'} "
        f"{metric(SIZES[first] if first else SIZES[last])}"
        for first, last in spans
    ]
    large = ", ".join(f"{name} {1e3 * found[name](1e9):,.1f} ms" for name in found)
    text = f"{ranks:,} GPUs, {place}. The fastest: {'; '.join(said)}. 1 GB: {large}."
    drawing = Drawing(LEFT + WIDE + 110, TOP + HIGH + 66, text, text)
    drawing.label(LEFT, 24, f"{ranks:,} H100s, {place}", 16, anchor="start", weight="bold")
    drawing.label(LEFT + WIDE, 24, f"1 GB: {large}", 13, anchor="end")

    def x(size: float) -> float:
        return LEFT + WIDE * (math.log10(size) - 3) / 7

    def y(seconds: float) -> float:
        return TOP + HIGH * (1 - (math.log10(seconds) + 6) / 7)  # 1 µs to 10 s

    for power in range(8):
        size, seconds = 10 ** (3 + power), 10 ** (power - 6)
        drawing.line(x(size), TOP, x(size), TOP + HIGH, FAINT, 0.4)
        drawing.line(LEFT, y(seconds), LEFT + WIDE, y(seconds), FAINT, 0.4)
        drawing.label(x(size), TOP + HIGH + 36, metric(size), 12)
        name = f"{seconds:g} s" if power > 5 else f"{1e3 * seconds:g} ms"
        name = f"{1e6 * seconds:g} µs" if power < 3 else name
        if power:  # below it stands who wins
            drawing.label(LEFT - 8, y(seconds) + 4, name, 12, anchor="end")
    drawing.label(LEFT + WIDE / 2, TOP + HIGH + 58, "bytes of the tensor", 13)
    low = {}
    for name, seconds in found.items():
        colour, dash = LOOKS[name]
        corners = [(x(size), y(seconds(size))) for size in SIZES]
        for (x1, y1), (x2, y2) in zip(corners, corners[1:], strict=False):
            drawing.line(x1, y1, x2, y2, colour, 2.6, dash)
        end = corners[-1][1]
        while any(abs(end - other) < 17 for other in low.values()):
            end += 4
        low[name] = end
        drawing.label(LEFT + WIDE + 8, end + 5, name, 14, colour, "start", "bold")
    for size, winner in zip(SIZES, winners, strict=True):  # who wins, as a band
        wide = WIDE / (len(SIZES) - 1)
        left = max(x(size) - wide / 2, LEFT)
        right = min(x(size) + wide / 2, LEFT + WIDE)
        colour = LOOKS[winner][0]
        drawing.box(left, TOP + HIGH + 6, right - left, 10, colour, colour, 0, radius=0)
    drawing.label(LEFT - 8, TOP + HIGH + 15, "wins", 12, anchor="end")
    return drawing


def all_reduce_table(laptop: Link, sizes: tuple[float, ...] = (1e4, 1e7, 1e9)) -> Table:
    """Ring and tree on this machine's link, on NVLink and over 16 nodes, in milliseconds."""
    here = {
        "ring": lambda nbytes: links.ring_seconds(nbytes, 4, laptop),
        "tree": lambda nbytes: links.tree_seconds(nbytes, 4, laptop),
    }
    places = {"this machine, 4 ranks": here, "NVLink, 8 GPUs": ways(8)}
    places["16 nodes, 128 GPUs"] = ways(128)
    rows = [
        [f"{name}, {way}", *(1e3 * found[way](size) for size in sizes)]
        for name, found in places.items()
        for way in ("ring", "tree")
    ]
    return formatted({"ms": ""} | {metric(size): ",.2f" for size in sizes}, rows)


def roads() -> Drawing:
    """Two nodes of eight GPUs with all that joins them, and what each road carries."""
    text = (
        "Two nodes. In each, eight GPUs with their memory (3,350 GB/s) share one NVLink "
        "switch (450 GB/s per GPU, one way). Each GPU also has a PCIe road (64 GB/s) to the "
        "host and to its own NIC (50 GB/s). NIC i of every node leads to rail switch i."
    )
    drawing = Drawing(760, 408, text, text)
    for node in (0, 1):
        _node(drawing, node, 16 + 376 * node)
    drawing.box(16, 356, 728, 30, FAINT, "#f2f2f2")
    words = "rail switches 0 to 7: NIC i of every node on switch i"
    drawing.label(380, 376, words, 13)
    return drawing


def _node(drawing: Drawing, node: int, left: float) -> None:
    drawing.box(left, 26, 352, 274, INK, "#ffffff", 1.4)
    drawing.label(left + 50, 18, f"node {node}", 14, weight="bold")
    drawing.box(left + 14, 38, 324, 26, INK, "#e8e8e8", 1)
    drawing.label(left + 176, 56, "NVLink switch", 13)
    nvlink, memory, pcie, network = (tone(i).text for i in (0, 1, 2, 3))
    for gpu in range(8):
        x = left + 34 + 40.5 * gpu
        drawing.line(x, 64, x, 100, nvlink, 4)
        drawing.box(x - 16, 100, 32, 50, INK, "#ffffff", 1.2, radius=3)
        drawing.label(x, 121, f"{gpu}", 13, weight="bold")
        drawing.box(x - 12, 128, 24, 17, memory, memory, 0, radius=2)
        drawing.label(x, 141, "HBM", 9, tone(1).on)
        drawing.line(x, 150, x, 182, pcie, 2)
        drawing.line(x, 208, x, 262, pcie, 2)
        drawing.box(x - 14, 262, 28, 22, INK, "#ffffff", 1, radius=3)
        drawing.label(x, 278, "NIC", 10)
        drawing.line(x, 284, x, 356, network, 2, "4 3")
    drawing.box(left + 14, 182, 324, 26, INK, "#e8e8e8", 1)
    drawing.label(left + 176, 200, "PCIe, and the host's processors and memory", 12)
    words = "in each GPU: HBM 3,350 GB/s"  # no road to anywhere
    drawing.label(left + 240, 18, words, 12, memory, weight="bold")
    for y, words, colour in (
        (86, "450 GB/s", nvlink),
        (166, "PCIe 64 GB/s", pcie),
        (236, "PCIe 64 GB/s", pcie),
        (322, "50 GB/s per NIC", network),
    ):
        drawing.label(left + 176, y, words, 12, colour, weight="bold", halo=True)


def on_one_axis(steps: Mapping[str, Priced]) -> Drawing:
    """Kernels and messages of rank 0 in each step, all over the same milliseconds."""
    last = max(found.seconds for found in steps.values())
    tick = next(t for t in (1, 2, 5, 10, 20, 50, 100, 200, 500) if 1e3 * last / t <= 8)
    left, wide, lane, row = 96, 660, 22, 78
    scale, bottom = wide / last, 26 + row * len(steps)
    said = "; ".join(
        f"{name}: {1e3 * found.seconds:.0f} ms, of which {1e3 * found.exposed:.0f} ms are "
        "exposed messages"
        for name, found in steps.items()
    )
    drawing = Drawing(left + wide + 30, bottom + 50, said, said)
    for i in range(int(1e3 * last / tick) + 1):
        x = left + scale * tick * i / 1e3
        drawing.line(x, 26, x, bottom, FAINT, 0.4)
        drawing.label(x, bottom + 16, f"{tick * i} ms", 12)
    for number, (name, found) in enumerate(steps.items()):
        top = 26 + row * number
        words = f"{name}: {1e3 * found.seconds:.0f} ms"
        drawing.label(left, top + 14, words, 13, anchor="start", weight="bold", halo=True)
        for i, kind in enumerate(("kernels", "messages"), 1):
            drawing.label(left - 8, top + lane * i + 13, kind, 12, anchor="end")
        for kind, fill, begin, end in bars(found.played[0], set()):
            x, length = left + scale * begin, max(scale * (end - begin), 0.4)
            drawing.box(x, top + lane * kind, length, lane - 4, fill, fill, 0, radius=0)
        end = left + scale * found.seconds
        drawing.line(end, top + 2, end, top + 3 * lane, INK, 1.2)
    legend = {"products": PRODUCTS, "other kernels": OTHERS, "messages": MESSAGES}
    for i, (name, fill) in enumerate(legend.items()):
        drawing.box(left + 180 * i, bottom + 28, 12, 12, INK, fill, 0.5, radius=0)
        drawing.label(left + 180 * i + 18, bottom + 39, name, 12, anchor="start")
    return drawing


def price_each(
    worker: Callable, variants: Mapping[str, Mapping], machine: str
) -> dict[str, Priced]:
    """`price` of a worker with each of these arguments, two at a time."""
    chosen = machine_of(machine)
    jobs = [(chosen.gpus, (), dict(given)) for given in variants.values()]
    return {
        name: Priced(worker, chosen.gpus, (), job[2], tapes, chosen)
        for name, job, tapes in zip(
            variants, jobs, tape_all(worker, jobs, timeout=300), strict=True
        )
    }


def memory_table(priced: Mapping[str, Priced]) -> Table:
    """Milliseconds of a step and gigabytes at its fullest moment, all and activations."""
    rows = []
    for name, found in priced.items():
        full = found.fullest()
        rows.append([name, 1e3 * found.seconds, *_gigabytes(full)])
    columns = {"": "", "ms": ",.0f", "GB at most": ".1f", "of it activations": ".1f"}
    return formatted(columns, rows)


def full_size(held: Mapping[int, Priced], layers: int = 32) -> float:
    """GB at the fullest with so many layers, from the same step with two other numbers.

    What is held grows by the same amount with each layer, in each phase of the step.
    """
    (small, few), (large, more) = held.items()
    further = (layers - large) / (large - small)
    pairs = zip(_phases(few), _phases(more), strict=True)
    return max(after + further * (after - before) for before, after in pairs) / 1e9


def _phases(found: Priced) -> list[float]:
    """The most bytes that each phase of the step holds."""
    curve = found.memory()
    return [
        max(kinds.total() for moment, kinds in curve if begin <= moment <= end)
        for _, begin, end in phases(found.played[0])
    ]


def _gigabytes(kinds: Counter) -> tuple[float, float]:
    return kinds.total() / 1e9, kinds["activations"] / 1e9
