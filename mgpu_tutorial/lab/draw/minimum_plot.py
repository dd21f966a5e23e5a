"""Where is the minimum? Measured repetitions with their spread, and a formula beside them."""

import statistics
from collections.abc import Mapping, Sequence

from mgpu_tutorial.lab.colours import COLOURS
from mgpu_tutorial.lab.draw.drawing import ALARM, INK
from mgpu_tutorial.lab.draw.plot import Plot


def fastest_setting(measured: Mapping[int, Sequence[float]]) -> int:
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

    xs, best = sorted(measured), fastest_setting(measured)
    middle = {x: statistics.median(measured[x]) for x in xs}
    spread = [
        [middle[x] - min(measured[x]) for x in xs],
        [max(measured[x]) - middle[x] for x in xs],
    ]
    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots()
    look = {"fmt": "o", "color": COLOURS[0], "markersize": 7, "capsize": 5, "linewidth": 1.5}
    label = "measured: median, fastest, slowest"
    axes.errorbar(xs, [middle[x] for x in xs], spread, label=label, **look)
    axes.plot(xs, [formula[x] for x in xs], "--", color=INK, label="formula")
    look = {"markersize": 17, "fillstyle": "none", "color": ALARM, "markeredgewidth": 2}
    axes.plot([best], [middle[best]], "o", **look)
    look = {"ha": "center", "color": ALARM, "fontweight": "bold", "fontsize": 12}
    place = {"xytext": (0, -26), "textcoords": "offset points"}
    axes.annotate(f"minimum: {best}", (best, middle[best]), **place, **look)
    axes.margins(x=0.09)
    axes.set_xscale("log", base=2)
    axes.set_xticks(xs, map(str, xs))
    axes.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=11)
    return Plot(figure, f"{ylabel} against {xlabel}: {', '.join(map(str, xs))}")
