"""Pictures for the notebook on collectives; no lesson is in here."""

import inspect
from collections.abc import Callable, Mapping

from mgpu_tutorial.lab import before_after, launch
from mgpu_tutorial.lab.draw.drawing import Drawing

GAP = 14


def movements(uses: Mapping[Callable, str], world_size: int = 4) -> Drawing:
    """Run each worker and draw below each other what every rank held before and after.

    Beside each stands the call, as it is in the worker's source, and what it is good for.
    """
    ran = [(launch(worker, world_size), worker.__name__) for worker in uses]
    widest = max(before_after(*run).width for run in ran)
    words = [(_call(worker), use) for worker, use in uses.items()]
    panels = [
        before_after(*run, said, words_at=widest + GAP)
        for run, said in zip(ran, words, strict=True)
    ]
    height = sum(panel.height + GAP for panel in panels) - GAP
    names = ", ".join(worker.__name__ for worker in uses)
    text = "\n\n".join(panel.text for panel in panels)
    alt = f"What each rank holds before and after {names}"
    drawing = Drawing(max(panel.width for panel in panels), height, text, alt)
    top = 0.0
    for panel in panels:
        moved = "".join(panel.parts)
        drawing.parts.append(f"<g transform='translate(0 {top:g})'>{moved}</g>")
        top += panel.height + GAP
    return drawing


def _call(worker: Callable) -> str:
    """The line of a worker that calls its collective."""
    lines = map(str.strip, inspect.getsource(worker).split("\n"))
    return next(line for line in lines if line.startswith("dist."))
