"""Plots of measured numbers: the picture differs from run to run, its text does not."""

import base64
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import cycle

from mgpu_tutorial.lab.colours import COLOURS
from mgpu_tutorial.lab.draw.drawing import INK

MARKERS = "osD^vPX"


class Plot:
    """A matplotlib figure as PNG; its text names what is drawn, but no measured number."""

    def __init__(self, figure, text: str) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        file = BytesIO()
        figure.set_dpi(110)
        canvas = FigureCanvasAgg(figure)  # figure.savefig would draw twice
        canvas.print_png(file, metadata={"Software": None})
        self.png, self.text = file.getvalue(), text

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_: object) -> tuple[dict, dict]:
        image = base64.b64encode(self.png).decode()
        return {"image/png": image, "text/plain": self.text}, {"image/png": {"width": 760}}


def curves(
    measured: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    fitted: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    xlabel: str,
    ylabel: str,
    scale: str = "log",
    labels: Mapping[str, Sequence[object]] | None = None,
) -> Plot:
    """Draw named series (x, y): measured as marks, fitted as lines; `scale` of both axes.

    `labels` has for a measured series what is written beside each of its marks.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.8), layout="constrained")
    axes = figure.subplots()
    for i, (name, (xs, ys)) in enumerate(measured.items()):
        style = MARKERS[i] if fitted else f"{MARKERS[i]}-"  # no fit: join the marks
        covers = 8 * (len(measured) - i) / len(measured)  # what is covered looks out
        size = 7 if fitted else 3 + covers
        axes.plot(xs, ys, style, color=COLOURS[i], lw=size / 2.5, markersize=size, label=name)
        for x, y, label in zip(xs, ys, (labels or {}).get(name, ()), strict=False):
            beside = {"textcoords": "offset points", "xytext": (7, -11), "fontsize": 10}
            axes.annotate(f"{label}", (x, y), color=COLOURS[i], **beside)
    for (name, (xs, ys)), style in zip(fitted.items(), cycle(("-", "--", ":"))):
        axes.plot(xs, ys, style, color=INK, linewidth=1.5, label=name)
    axes.set(xscale=scale, yscale=scale, xlabel=xlabel, ylabel=ylabel)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    beside = {"loc": "upper left", "bbox_to_anchor": (1, 1)}  # many names would cover marks
    many = len(measured) + len(fitted) > 6
    axes.legend(frameon=False, fontsize=11, **(beside if many else {}))
    return Plot(figure, f"{ylabel} against {xlabel}: {', '.join([*measured, *fitted])}")
