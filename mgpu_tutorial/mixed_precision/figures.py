"""Apparatus: ranges and errors of short formats, gradients in float16, steps of two ranks."""

import math
from collections.abc import Mapping, Sequence

import torch

from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.colours import COLOURS
from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import MARKERS, Plot
from mgpu_tutorial.lab.record.report import Report

# powers of two at which float16 has 0, fewer bits, all its bits, and infinity
PARTS = {
    (-42, -25): ("0.8", "rounded to 0"),
    (-25, -14): ("0.92", "subnormal: fewer bits"),
    (-14, 16): ("white", "normal: all 10 bits"),
    (16, 18.5): ("0.8", "∞"),
}


def formats_picture(formats: Sequence[torch.dtype]) -> Plot:
    """A bar per format, over the powers of two that it reaches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 2.6), layout="constrained")
    axes = figure.subplots()
    for place, (dtype, colour) in enumerate(zip(formats, COLOURS, strict=False)):
        of = torch.finfo(dtype)
        lowest, normal, largest = (
            math.log2(end)
            for end in (of.smallest_normal * of.eps, of.smallest_normal, of.max)
        )
        axes.barh(place, normal - lowest, left=lowest, color="white", ec=colour, hatch="///")
        axes.barh(place, largest - normal, left=normal, color=colour, ec=colour)
        digits = f"{-math.log2(of.eps):.0f} bits"
        axes.text(largest + 3, place, digits, va="center", fontsize=11)
    names = [str(dtype).removeprefix("torch.") for dtype in formats]
    axes.set_yticks(range(len(formats)), names, fontsize=11)
    axes.invert_yaxis()
    ticks = range(-144, 129, 48)
    axes.set_xticks(ticks, [f"$2^{{{power}}}$" for power in ticks])
    axes.set_xlim(-155, 155)
    axes.set_xlabel("size of a number; hatched: subnormal, where the fraction has fewer bits")
    axes.spines[["top", "right", "left"]].set_visible(False)
    return Plot(figure, f"range and fraction of {', '.join(names)}")


def served_picture(shapes: Mapping[str, tuple[int, int]], size: int = 256) -> Plot:
    """A square matrix per recipe, in the parts of rows and columns that share a scale.

    Sixteen stripes stand for all its rows, so that a single row can be seen.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(9, 2.3), layout="constrained")
    grid = figure.subplots(1, len(shapes))
    for axes, (name, (rows, columns)) in zip(grid, shapes.items(), strict=True):
        stripes = max(1, 16 * rows // size)
        for top in range(0, 16, stripes):
            for left in range(0, size, columns):
                tone = COLOURS[(top // stripes + left // columns) % 2]
                axes.add_patch(Rectangle((left, top), columns, stripes, color=tone, lw=0))
        axes.set(xlim=(0, size), ylim=(16, 0), xticks=[], yticks=[])
        axes.set_box_aspect(1)
        axes.set_title(name, fontsize=10.5)
    return Plot(figure, f"what one scale serves: {', '.join(shapes)}")


def error_picture(x: torch.Tensor, shortened: Mapping[str, torch.Tensor]) -> Plot:
    """The mean relative error of the numbers of each size, a line per way to shorten them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots()
    powers = x.abs().log2().floor().clamp(min=-8)
    for (name, short), colour, mark in zip(shortened.items(), COLOURS, MARKERS, strict=False):
        off = (short - x).abs() / x.abs()
        sizes = powers.unique().tolist()
        means = [100 * off[powers == power].mean().item() for power in sizes]
        axes.plot(sizes, means, f"{mark}-", color=colour, label=name)
    ticks = sizes[::2]
    axes.set_xticks(ticks, [f"$2^{{{power:.0f}}}$" for power in ticks])
    axes.set(xlabel="size of a number", ylabel="mean error (%)", ylim=(0, 105))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=11)
    return Plot(figure, f"error against the size of a number: {', '.join(shortened)}")


def gradient_picture(rows: Mapping[str, torch.Tensor]) -> Plot:
    """A histogram per row over the powers of two, and what float16 does there."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    grid = figure.subplots(len(rows), 1, sharex=True)
    for axes, (name, gradients), colour in zip(grid, rows.items(), COLOURS, strict=False):
        powers = gradients[gradients != 0].abs().log2().tolist()
        axes.hist(powers, range(-42, 19), color=colour, edgecolor=INK, lw=0.5)
        axes.set(yticks=[], xlim=(-42, 18.5))
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=11)
        axes.spines[["top", "right", "left"]].set_visible(False)
        for (begin, end), (shade, text) in PARTS.items():
            axes.axvspan(begin, end, color=shade, lw=0, zorder=0)
            if axes is grid[0]:
                place = (begin + end) / 2, axes.get_ylim()[1]
                axes.text(*place, text, ha="center", va="bottom")
    ticks = range(-40, 17, 8)
    axes.set_xticks(ticks, [f"$2^{{{power}}}$" for power in ticks])
    axes.set_xlabel("size of a gradient")
    return Plot(figure, f"gradients in the range of float16, a row each: {', '.join(rows)}")


def steps_table(report: Report) -> Table:
    """A row per step of `train_scaled` on two ranks: who met an infinity, scales, weights."""
    rows = []
    for step, pair in enumerate(zip(*report.results, strict=True)):
        met = [f"rank {rank}" for rank, (finite, _, _) in enumerate(pair) if not finite]
        scales = [f"2^{math.log2(scale):.0f}" for _, scale, _ in pair]
        alike = "alike" if torch.equal(pair[0][2], pair[1][2]) else "differ"
        states = ["finite" if w.isfinite().all() else "broken" for _, _, w in pair]
        where = "both" if len(met) == 2 else "".join(met)
        rows.append([step, where, *scales, alike, *states])
    of_both = [f"{what}, rank {rank}" for what in ("scale", "weights") for rank in (0, 1)]
    head = ["step", "inf or NaN on", *of_both[:2], "the weights", *of_both[2:]]
    return Table(head, rows)
