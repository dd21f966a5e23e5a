"""Apparatus: the dtypes of layers, where gradients lie in float16, the steps of two ranks."""

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.functional import nll_loss
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from mgpu_tutorial.distributed_sgd.sgd import average_gradients, flat_parameters, new_model
from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.colours import COLOURS
from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.mixed_precision.precision import FinishStep, train_scaled
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


def observe(module: nn.Module, *inputs: torch.Tensor) -> dict[str, str]:
    """The dtype that each layer of `module` returns for `inputs`, seen by a forward hook."""
    seen: dict[str, str] = {}

    def note(name: str, _: nn.Module, __: tuple, output: torch.Tensor) -> None:
        seen[name] = dtype_name(output.dtype)

    layers = [(n, m) for n, m in module.named_modules() if not list(m.children())]
    handles = [layer.register_forward_hook(partial(note, name)) for name, layer in layers]
    module(*inputs)
    for handle in handles:
        handle.remove()
    return seen


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def steps_table(report: Report) -> Table:
    """A row per step of `train_scaled` on two ranks: who met an infinity, scales, weights."""
    (mine, _), (other, _) = report.results
    rows = []
    for step, pair in enumerate(zip(mine, other, strict=True)):
        met = [f"rank {rank}" for rank in (0, 1) if not pair[rank].finite_gradients]
        where = "both" if len(met) == 2 else "".join(met)
        scales = [f"2^{math.log2(record.scale):.0f}" for record in pair]
        alike = "alike" if pair[0].weights == pair[1].weights else "differ"
        finite = ["finite" if record.finite_weights else "broken" for record in pair]
        rows.append([step, where, *scales, alike, *finite])
    head = ["step", "inf or NaN on", "scale 0", "scale 1", "weights", "rank 0", "rank 1"]
    return Table(head, rows)


def moved(weights: torch.Tensor) -> float:
    """How far a training has brought the weights of `new_model`, all of them together."""
    start = flat_parameters(new_model()[0])
    return (weights - start).norm().item()


def train_clipped(
    rank: int, world_size: int, finish_step: FinishStep | None = None
) -> torch.Tensor:
    """All ranks take steps ended by `finish_step`; rank 1 meets an infinity in step 1.

    Returns the parameters. Without `finish_step` they are those of a run without a scale,
    whose gradients are clipped to the norm 0.05.
    """

    def clip(model: nn.Module, optimizer: Optimizer, scaler: GradScaler) -> None:
        average_gradients(model)
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()

    scale = 1024.0 if finish_step else 1.0
    order = finish_step or clip
    return train_scaled(rank, world_size, order, infinite=(1, 1), init_scale=scale)[1]


def image_rows(rows: Mapping[str, torch.Tensor], side: int) -> Plot:
    """Draw images (n, side * side), 0 white and 1 black, in a row under each name's label."""
    from matplotlib.figure import Figure

    count = max(map(len, rows.values()))
    figure = Figure(figsize=(9, 0.2 + 0.66 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), 1, squeeze=False)[:, 0]
    for axes, (name, images) in zip(grid, rows.items(), strict=True):
        strip = images.view(-1, side, side).transpose(0, 1).reshape(side, -1)
        axes.imshow(strip, cmap="gray_r", vmin=0, vmax=1)
        axes.set_xlim(0, count * side)
        axes.set(xticks=[], yticks=[])
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=11)
        axes.spines[:].set_visible(False)
    return Plot(figure, f"images, a row each: {', '.join(rows)}")
