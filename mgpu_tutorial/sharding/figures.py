"""Apparatus, not the lesson: what the stages hold and send, and when."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import nn

from mgpu_tutorial.instruments.price.picture import ticks
from mgpu_tutorial.instruments.price.pricing import Priced
from mgpu_tutorial.lab import film, frame, launch
from mgpu_tutorial.lab.borrowed import backward_number
from mgpu_tutorial.lab.colours import MEMORY
from mgpu_tutorial.lab.draw.drawing import ALARM, FAINT, INK, PAPER, Drawing
from mgpu_tutorial.lab.draw.film import Film
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.words import bytes_text, in_a_row
from mgpu_tutorial.sharding.blocks import ShardedBlock
from mgpu_tutorial.sharding.stages import loss_of, new_tower

FILLS = {  # of bytes, told apart in grey too
    "parameters": MEMORY["parameters"],
    "gradients": MEMORY["gradients"],
    "master weights": "#ccd3da",
    "moments": MEMORY["optimizer"],
}
DASHES = ("", "7 3", "2 2", "9 3 2 3")
LINES = ("#9a9a9a", 2.6), ("#6b6b6b", 1.8), ("#3d3d3d", 2.2), (INK, 2.2)  # of curves


def bars(held: Mapping[str, Mapping[str, float]], limit: float) -> Drawing:
    """A bar for each row, of the GB of each kind; a dashed line where a GPU is full.

    The axis ends at three times the limit, whatever is held, so that pictures compare.
    """
    totals = {name: sum(kinds.values()) for name, kinds in held.items()}
    lines = [
        f"{name}: {totals[name]:,.1f} GB, "
        + ", ".join(f"{kind} {gb:,.1f}" for kind, gb in kinds.items())
        for name, kinds in held.items()
    ]
    each = ", ".join(f"{name} {total:,.1f}" for name, total in totals.items())
    fits = [name for name, total in totals.items() if total <= limit]
    alt = f"GB on a rank beside the {limit:g} that it has: {each}. "
    alt += f"It fits with {in_a_row(fits)}." if fits else "Nothing fits."
    left, wide, row = 80, 500, 26  # pixels
    scale, bottom = wide / (3 * limit), 44 + row * len(held)
    drawing = Drawing(left + wide + 90, bottom + 22, "\n".join(lines), alt)
    for i, (kind, fill) in enumerate(FILLS.items()):
        drawing.box(left + 130 * i, 10, 13, 13, INK, fill, 0.6, radius=0)
        drawing.label(left + 130 * i + 19, 21, kind, 13, anchor="start")
    labels = []
    for i, (name, kinds) in enumerate(held.items()):
        top, x = 38 + row * i, left
        drawing.label(left - 10, top + 15, name, 13, anchor="end")
        for kind, gb in kinds.items():
            length = min(scale * gb, left + wide - x)
            drawing.box(x, top, length, row - 7, INK, FILLS[kind], 0.6, radius=0)
            x += length
        cut = scale * totals[name] > wide
        if cut:  # there is more than the axis has room for
            for at in (x - 14, x - 8):
                drawing.line(at - 4, top + row - 5, at + 4, top - 2, PAPER, 3)
        text = f"{totals[name]:,.0f} GB →" if cut else f"{totals[name]:.1f} GB"
        labels.append((x + 8, top + 15, text))
    full = left + scale * limit
    drawing.line(full, 32, full, bottom, ALARM, 1.4, "5 3")
    drawing.label(full, bottom + 15, f"{limit:g} GB", 13, ALARM)
    for label in labels:
        drawing.label(*label, 13, INK, "start", "bold", halo=True)
    return drawing


def memory_curves(priced: Mapping[str, Priced]) -> Drawing:
    """The bytes that a rank holds over its step, a curve for each way, on one axis."""
    left, top, wide, high = 70, 14, 560, 190  # pixels
    most = {name: found.fullest().total() for name, found in priced.items()}
    seconds = max(found.seconds for found in priced.values())
    lines = [f"{name}: {most[name] / 1e9:.1f} GB at most" for name in priced]
    alt = f"Memory of rank 0 over a step of up to {1e3 * seconds:.0f} ms. {'; '.join(lines)}."
    drawing = Drawing(left + wide + 170, top + high + 42, "\n".join(lines), alt)
    x, y = wide / seconds, high / (1.05 * max(most.values()))
    base = top + high
    for i, (name, found) in enumerate(priced.items()):
        (colour, width), dash = LINES[i % len(LINES)], DASHES[i % len(DASHES)]
        tops: dict[int, float] = {}  # by pixel, the most of it
        for moment, kinds in found.memory():
            pixel = round(x * moment)
            tops[pixel] = max(tops.get(pixel, 0.0), y * kinds.total())
        corners, last = [], 0.0
        for pixel, tall in tops.items():
            corners += [(pixel, last)] * bool(corners) + [(pixel, tall)]
            last = tall
        places = " ".join(f"{left + at},{base - tall:.1f}" for at, tall in corners)
        drawing.parts.append(
            f"<polyline points='{places}' fill='none' stroke='{colour}' "
            f"stroke-width='{width}' stroke-dasharray='{dash}'/>"
        )
        middle = top + 16 + 40 * i
        drawing.line(left + wide + 14, middle, left + wide + 40, middle, colour, width, dash)
        drawing.label(left + wide + 46, middle + 5, name, 14, INK, "start", "bold")
        text = f"{most[name] / 1e9:.1f} GB at most"
        drawing.label(left + wide + 46, middle + 21, text, 12, INK, "start")
    drawing.line(left, base, left + wide, base)
    drawing.line(left, top, left, base)
    for moment in ticks(seconds):
        drawing.label(left + x * moment, base + 18, f"{1e3 * moment:g} ms", 12)
    step = 5e9
    for i in range(1 + int(high / y / step)):
        drawing.line(left - 4, base - y * step * i, left, base - y * step * i)
        drawing.label(left - 8, base - y * step * i + 4, f"{5 * i} GB", 12, anchor="end")
    return drawing


def film_with_curve(report: Report, most: Sequence[int]) -> Film:
    """A film with a curve of these bytes under it, one number a frame."""
    shown = film(report)
    for number, page in enumerate(shown.frames):
        page.height += 64
        left, right, bottom = 64, page.width - 90, page.height - 12
        across = (right - left) / (len(most) - 1)
        at = [(left + across * i, bottom - 38 * n / max(most)) for i, n in enumerate(most)]
        page.line(left, bottom, right, bottom, FAINT, 1)
        page.label(left - 6, bottom + 4, "0", 11, anchor="end")
        for before, after in pairwise(at):
            page.line(*before, *after, INK, 2)
        x, y = at[number]
        page.box(x - 5, y - 5, 10, 10, INK, INK, 1)
        page.label(8, bottom - 14, "bytes", 14, anchor="start")
        text = bytes_text(most[number])
        page.label(right + 10, bottom - 14, text, 14, INK, "start", "bold")
    return shown


def film_blocks(rank: int, world_size: int, kind: type[ShardedBlock]) -> list[int]:
    """A forward and backward of two blocks: a frame after each change, and its bytes."""
    tower, gradients, in_all = new_tower()[:2], [None] * 2, []

    def look(says: str) -> None:
        bricks, held = {}, []
        for i, (block, gradient) in enumerate(zip(tower, gradients, strict=True)):
            bricks[f"block {i}"] = [rank] if block.whole is None else range(world_size)
            own = "whole" if gradient is not None else []
            bricks[f"gradient {i}"] = own if block.shard.grad is None else "mean ½"
            held += block.shard, block.whole, gradient, block.shard.grad
        in_all.append(sum(t.nbytes for t in held if t is not None))
        frame(says, bricks)

    class FilmedBlock(kind):
        def unshard(self) -> torch.Tensor:
            whole = super().unshard()
            self.whole = whole.detach()
            caller = "forward" if backward_number() < 0 else "unpack"
            look(f"Block {self.i}, {caller}: unshard, by an all-gather. Then it computes.")
            return whole

        def reshard(self, gradient: torch.Tensor | None = None) -> None:
            super().reshard()
            gradients[self.i] = gradient
            now = "forward: reshard."
            if gradient is not None:
                now = "the gradient's hook: reshard. Its gradient stays."
            look(f"Block {self.i}, {now}")

        def scattered(self, shard: nn.Parameter) -> None:
            gradients[self.i] = None
            says = "the gradients' mean, and its own shard only, by a reduce-scatter."
            look(f"Block {self.i}, Gather.backward: {says}")

    for i in range(2):
        tower[i] = FilmedBlock(tower[i])
        tower[i].i = i
        tower[i].shard.register_post_accumulate_grad_hook(tower[i].scattered)
    look("Between steps each rank has its shard of every block.")
    loss_of(tower, 0, rank, world_size).backward()
    return in_all


def block_film(kind: type[ShardedBlock] = ShardedBlock) -> Film:
    """Launches two ranks, and shows which blocks of this kind are whole at each moment."""
    report = launch(film_blocks, 2, kind, trace=True)
    return film_with_curve(report, report.results[0])
