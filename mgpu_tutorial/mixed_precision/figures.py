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

LIMITS = torch.finfo(torch.float16)
LEAST, MOST = -42, 18.5  # powers of two in the picture
# where float16 ends: from -25 down it has 0, below -14 fewer bits, from 16 up infinity
PARTS = {
    (LEAST, -25): "rounded to 0",
    (-25, -14): "subnormal: fewer bits",
    (-14, 16): "normal: 11 bits each",
    (16, MOST): "∞",
}


def gradients_behind_conv1(batch: int = 600) -> torch.Tensor:
    """The gradients behind the first convolution in float32, without the zeros."""
    data, (model, _) = digits(), new_model()
    outputs = []
    model.conv1.register_forward_hook(lambda _, __, output: outputs.append(output))
    loss = nll_loss(model(data.images[:batch]), data.labels[:batch])
    (gradient,) = torch.autograd.grad(loss, outputs)
    return gradient[gradient != 0]


def shares_in_float16(gradients: torch.Tensor) -> tuple[float, float, float, float]:
    """The shares that become 0, subnormal, normal and infinite when stored in float16."""
    stored = gradients.half().abs()
    ends = stored == 0, stored < LIMITS.smallest_normal, stored <= LIMITS.max
    zero, low, finite = (end.float().mean().item() for end in ends)
    return zero, low - zero, finite - low, 1 - finite


def gradient_picture(rows: Mapping[str, torch.Tensor]) -> Plot:
    """A histogram per row over the powers of two, and what float16 does there."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.3 + 1.1 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (name, gradients), colour in zip(grid, rows.items(), COLOURS, strict=False):
        for (begin, end), shade in zip(PARTS, ("0.8", "0.92", "white", "0.8"), strict=True):
            axes.axvspan(begin, end, color=shade, lw=0)
        powers = gradients.abs().log2().tolist()
        axes.hist(powers, range(LEAST, 19), color=colour, edgecolor=INK, lw=0.5)
        axes.set(yticks=[], xlim=(LEAST, MOST))
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=11)
        axes.spines[["top", "right", "left"]].set_visible(False)
    for place, text in PARTS.items():
        grid[0].text(sum(place) / 2, grid[0].get_ylim()[1], text, ha="center", va="bottom")
    ticks = range(-40, 17, 8)
    grid[-1].set_xticks(ticks, [f"$2^{{{power}}}$" for power in ticks])
    grid[-1].set_xlabel("size of a gradient")
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
    head = ["step", "inf or NaN on", "scale 0", "scale 1", "both", "weights 0", "weights 1"]
    return Table(head, rows)
