"""Apparatus: where gradients lie in the range of float16, and the steps of two ranks."""

import math
from collections.abc import Mapping

import torch
from torch.nn.functional import nll_loss

from mgpu_tutorial.distributed_sgd.sgd import new_model
from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.colours import COLOURS
from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.shared.data import digits

# powers of two at which float16 has 0, fewer bits, all its bits, and infinity
PARTS = {
    (-42, -25): ("0.8", "rounded to 0"),
    (-25, -14): ("0.92", "subnormal: fewer bits"),
    (-14, 16): ("white", "normal: 11 bits each"),
    (16, 18.5): ("0.8", "∞"),
}


def gradients_behind_conv1(batch: int = 600) -> torch.Tensor:
    """The gradients behind the first convolution in float32, without the zeros."""
    data, (model, _) = digits(), new_model()
    outputs = []
    model.conv1.register_forward_hook(lambda _, __, output: outputs.append(output))
    loss = nll_loss(model(data.images[:batch]), data.labels[:batch])
    (gradient,) = torch.autograd.grad(loss, outputs)
    return gradient[gradient != 0]


def gradient_picture(rows: Mapping[str, torch.Tensor]) -> Plot:
    """A histogram per row over the powers of two, and what float16 does there."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    grid = figure.subplots(len(rows), 1, sharex=True)
    for axes, (name, gradients), colour in zip(grid, rows.items(), COLOURS, strict=False):
        powers = gradients.abs().log2().tolist()
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
