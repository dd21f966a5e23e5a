"""Apparatus: the processor seconds of the stored comparison as a picture."""

from collections.abc import Sequence
from typing import Any

from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import Plot

FORWARD = {"facecolor": "#a9c9e8", "edgecolor": INK, "linewidth": 0.6}
BACKWARD = {**FORWARD, "facecolor": "#f2b36b", "hatch": "////"}
NUMBER = {"facecolor": "white", "linewidth": 0, "pad": 1.2}


def parts_picture(rows: Sequence[dict[str, Any]]) -> Plot:
    """Processor seconds of forward and backward, and the step as a share of one device's."""
    from matplotlib.figure import Figure

    figure, lines = Figure(figsize=(9, 2.6), layout="constrained"), []
    networks = list(dict.fromkeys(row["network"] for row in rows))
    panels = figure.subplots(1, len(networks), sharey=True, squeeze=False)[0]
    for axes, network in zip(panels, networks, strict=True):
        mine = {row["setup"]: row["seconds"] for row in rows if row["network"] == network}
        for name, (forward, backward, update) in mine.items():
            share = f"{(forward + backward + update) / sum(mine['one device']):.2f}"
            first = axes.barh(name, forward, 0.72, label="forward", **FORWARD)
            rest = axes.barh(name, backward, 0.72, forward, label="backward", **BACKWARD)
            for bar in (first, rest):
                axes.bar_label(bar, fmt="%.1f", label_type="center", bbox=NUMBER)
            axes.bar_label(rest, [share], padding=6, fontsize=11, fontweight="bold")
            lines.append(f"{network}, {name}: {forward:.2f} + {backward:.2f} s, {share}")
        axes.set_title(network, loc="left", fontweight="bold")
        axes.margins(x=0.25)
        axes.tick_params(bottom=False, left=False, labelbottom=False, labelsize=11)
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.invert_yaxis()
    figure.legend(handles=[first, rest], loc="outside upper right", ncols=2, frameon=False)
    return Plot(figure, "\n".join(lines))
