"""Where is the minimum? Measured repetitions with their spread, and a formula beside them."""

import statistics
from collections.abc import Mapping, Sequence

from mgpu_tutorial.lab.drawing import ALARM, INK
from mgpu_tutorial.lab.plot import Plot
from mgpu_tutorial.lab.report import COLOURS


def fastest(measured: Mapping[int, Sequence[float]]) -> int:
    """The setting with the smallest median."""
    return min(measured, key=lambda x: statistics.median(measured[x]))


def minimum_plot(
    measured: Mapping[int, Sequence[float]],
    formula: Mapping[int, float],
    xlabel: str,
    ylabel: str,
) -> Plot:
    """Draw medians with bars from the fastest to the slowest repetition; mark the minimum.

    Raises ValueError for a setting without a measurement.
    """
    if not measured or not all(measured.values()):
        raise ValueError("each setting needs at least one measurement")
    from matplotlib.figure import Figure

    xs = sorted(measured)
    middle = [statistics.median(measured[x]) for x in xs]
    below = [m - min(measured[x]) for x, m in zip(xs, middle, strict=True)]
    above = [max(measured[x]) - m for x, m in zip(xs, middle, strict=True)]
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots()
    spread = {"yerr": [below, above], "capsize": 5, "linewidth": 1.5}
    label = "measured: median, fastest, slowest"
    axes.errorbar(xs, middle, fmt="o", color=COLOURS[0], markersize=7, label=label, **spread)
    axes.plot(xs, [formula[x] for x in xs], "--", color=INK, label="formula")
    best = fastest(measured)
    low = statistics.median(measured[best])
    axes.plot([best], [low], "o", markersize=17, fillstyle="none", color=ALARM, mew=2)
    axes.annotate(
        f"minimum: {best}", (best, low), (0, -22), textcoords="offset points",
        ha="center", color=ALARM, fontweight="bold", fontsize=12,
    )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(xs, map(str, xs))
    top = max(max(measured[x]) for x in xs)
    axes.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, min(top, 2.5 * max(middle)) * 1.05))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=11)
    return Plot(figure, f"{ylabel} against {xlabel}: {', '.join(map(str, xs))}")
