"""The timeline of one rank on a machine, and its memory under it, as an SVG."""

from collections import Counter
from collections.abc import Sequence
from math import floor, log10

from mgpu_tutorial.instruments.price.machine import Machine
from mgpu_tutorial.instruments.price.replay import Played
from mgpu_tutorial.instruments.price.tape import KINDS, Call, Mark, Operation
from mgpu_tutorial.lab.colours import MEMORY
from mgpu_tutorial.lab.draw.drawing import ALARM, FAINT, INK, Drawing

WIDTH, LEFT, LANE, HIGH = 720, 96, 22, 120  # pixels; `HIGH` is the memory's
FILLS = tuple(MEMORY[kind] for kind in KINDS)
PRODUCTS, OTHERS, MESSAGES = "#37474f", "#b0bec5", "#8d6e63"  # no rank has these


def draw(
    player: Played,
    memory: Sequence[tuple[float, Counter]],
    machine: Machine,
    text: str,
    first: float = 0,
) -> Drawing:
    """Lanes for phases, kernels and messages over one axis, and bytes by kind below.

    first: the seconds of another setting, which the axis covers too and a broken line ends
    """
    alt = (
        f"Rank {player.rank} on {machine.name}: {1e3 * player.seconds:.0f} ms, of which "
        f"{1e3 * player.exposed:.0f} ms are exposed messages."
    )
    bottom = 4 * LANE + HIGH + 30
    drawing = Drawing(LEFT + WIDTH + 60, bottom + 56, text, alt)
    reach = max(player.seconds, first) or 1
    scale = WIDTH / reach
    lanes = ["", "kernels", "messages"]
    streams = {e.stream for e in player.events if isinstance(e, Operation)} - {0}
    for lane, name in enumerate(lanes):
        drawing.label(LEFT - 8, 20 + LANE * lane + 14, name, 12, anchor="end")
    for name, begin, end in phases(player):
        if scale * (end - begin) > 7 * len(name):
            drawing.label(LEFT + scale * (begin + end) / 2, 34, name, 12)
        drawing.line(
            LEFT + scale * begin, 22, LEFT + scale * begin, 20 + 3 * LANE, FAINT, 0.7
        )
    for lane, fill, begin, end in bars(player, streams):
        left, wide = LEFT + scale * begin, max(scale * (end - begin), 0.4)
        drawing.box(left, 20 + LANE * lane + 2, wide, LANE - 4, fill, fill, 0, radius=0)
    _memory(drawing, memory, machine, scale, 4 * LANE + 14)
    if first:
        end = LEFT + scale * first
        drawing.line(end, 22, end, 20 + 3 * LANE, INK, 1, "4 3")
        drawing.label(end, 16, f"{1e3 * first:.4g} ms as priced", 11, anchor="end")
    for seconds in ticks(reach):
        drawing.label(LEFT + scale * seconds, bottom, f"{1e3 * seconds:g} ms", 11)
    legend = [(PRODUCTS, "products"), (OTHERS, "other kernels"), (MESSAGES, "messages")]
    legend += [*zip(FILLS, KINDS, strict=True)]
    for i, (fill, name) in enumerate(legend):
        left, top = LEFT + 180 * (i % 4), bottom + 14 + 18 * (i // 4)
        drawing.box(left, top, 12, 12, INK, fill, 0.5, radius=0)
        drawing.label(left + 18, top + 11, name, 12, anchor="start")
    return drawing


def ticks(reach: float) -> list[float]:
    """Round numbers from 0 up to `reach`, three to six of them."""
    power = 10 ** floor(log10(reach))
    step = next(size for n in (0.2, 0.5, 1, 2) if reach / (size := n * power) < 6)
    return [round(i * step, 12) for i in range(int(reach / step) + 1)]


def phases(player: Played) -> list[tuple[str, float, float]]:
    """The spans inside the step: name, begin and end."""
    found, open_at = [], {}
    for position, event in enumerate(player.events):
        if isinstance(event, Mark) and event.name:
            if event.begins:
                open_at[event.name] = player.begins[position]
            elif event.name in open_at:
                found.append((event.name, open_at.pop(event.name), player.begins[position]))
    return found


def bars(player: Played, streams: set[int]) -> list[tuple[int, str, float, float]]:
    """Lane, colour, begin and end; neighbours that look alike are one bar."""
    found: list[tuple[int, str, float, float]] = []
    last: dict[int, int] = {}
    for position, event in enumerate(player.events):
        if not isinstance(event, Operation | Call):
            continue
        begin, end = player.begins[position], player.ends[position]
        if isinstance(event, Call):
            lane, fill = 2, MESSAGES
        elif event.stream:
            continue
        else:
            lane, fill = 1, PRODUCTS if event.flops else OTHERS
        before = last.get(lane)
        close = player.seconds / WIDTH
        if before is not None and lane == 1:
            _, other, first, until = found[before]
            short = min(until - first, end - begin) < close / 2
            if begin - until < close / 4 and (other == fill or short):
                longer = other if until - first >= end - begin else fill
                found[before] = (lane, longer, first, end)
                continue
        last[lane] = len(found)
        found.append((lane, fill, begin, end))
    return found


def _memory(drawing, memory, machine: Machine, scale: float, top: float) -> None:
    memory = _thinned(memory, 1 / scale)
    most = 1.1 * max(kinds.total() for _, kinds in memory)
    shows_limit = machine.memory < 3 * most
    most = max(most, machine.memory * shows_limit, 1)
    high = (HIGH - 8) / most
    base = top + HIGH
    floor = [0.0] * len(memory)
    for kind, fill in zip(KINDS, FILLS, strict=True):
        roof = [low + kinds[kind] for low, (_, kinds) in zip(floor, memory, strict=True)]
        points = [*_steps(memory, roof), *reversed(_steps(memory, floor))]
        places = " ".join(f"{LEFT + scale * x:.1f},{base - high * y:.1f}" for x, y in points)
        drawing.parts.append(f"<polygon points='{places}' fill='{fill}'/>")
        floor = roof
    limit = machine.memory if shows_limit else most / 1.1
    roof, colour = base - high * limit, ALARM if shows_limit else INK
    drawing.line(LEFT, roof, LEFT + WIDTH, roof, colour, 1, "5 3")
    drawing.label(LEFT - 8, roof + 4, f"{limit / 1e9:.3g} GB", 11, colour, "end")
    drawing.label(LEFT - 8, base, "memory", 12, anchor="end")
    drawing.line(LEFT, base, LEFT + WIDTH, base, INK, 1)


def _thinned(memory, pixel: float) -> list[tuple[float, Counter]]:
    """One moment a pixel: that with the most."""
    kept = memory[:1]
    for moment, kinds in memory[1:]:
        if moment - kept[-1][0] >= pixel:
            kept.append((moment, kinds))
        elif kinds.total() > kept[-1][1].total():
            kept[-1] = kept[-1][0], kinds
    return [*kept, memory[-1]]


def _steps(memory, heights: list[float]) -> list[tuple[float, float]]:
    """The corners of a curve that stays at a height until the next moment."""
    corners = []
    for i, ((moment, _), height) in enumerate(zip(memory, heights, strict=True)):
        if i:
            corners.append((moment, heights[i - 1]))
        corners.append((moment, height))
    return corners
