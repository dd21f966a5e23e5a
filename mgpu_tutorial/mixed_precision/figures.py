"""Apparatus: the dtypes of layers, where gradients lie in float16, the steps of two ranks."""

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
NORMAL = math.log2(LIMITS.smallest_normal)  # below 2^-14 a number has fewer bits
ZERO = math.log2(LIMITS.smallest_normal * LIMITS.eps) - 1  # to 2^-25 it is rounded to 0
INFINITE = math.log2(LIMITS.max)  # above 2^16 it is infinite


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
    parts = [
        stored == 0,
        (stored > 0) & (stored < LIMITS.smallest_normal),
        (stored >= LIMITS.smallest_normal) & stored.isfinite(),
        stored.isinf(),
    ]
    return tuple(part.float().mean().item() for part in parts)


def gradient_picture(rows: Mapping[str, torch.Tensor]) -> Plot:
    """A histogram per row over the powers of two, and what float16 does there."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.3 + 1.1 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), 1, sharex=True, squeeze=False)[:, 0]
    edges = range(-42, 19)
    for axes, (name, gradients), colour in zip(grid, rows.items(), COLOURS, strict=False):
        axes.axvspan(-42, ZERO, color="0.8", lw=0)
        axes.axvspan(ZERO, NORMAL, facecolor="0.93", edgecolor="0.75", hatch="//", lw=0)
        axes.hist(gradients.abs().log2().tolist(), edges, color=colour, edgecolor=INK, lw=0.5)
        axes.axvspan(INFINITE, 18.5, color="0.8", lw=0)
        axes.set(yticks=[], xlim=(-42, 18.5))
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=11)
        axes.spines[["top", "right", "left"]].set_visible(False)
    words = {
        -33.5: "rounded to 0",
        -19.5: "subnormal: fewer bits",
        1: "normal: 11 bits each",
        17.2: "∞",
    }
    place = grid[0].get_xaxis_transform()
    for x, text in words.items():
        grid[0].text(x, 1.04, text, transform=place, ha="center", fontsize=11)
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
