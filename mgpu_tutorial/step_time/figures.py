"""Apparatus, not the lesson: a chart of parts, and the answer of an exercise."""

from mgpu_tutorial.instruments.price.picture import MESSAGES, OTHERS, PRODUCTS
from mgpu_tutorial.lab.draw.drawing import INK, PAPER, Drawing
from mgpu_tutorial.step_time import published
from mgpu_tutorial.step_time.published import Prediction

KINDS = {  # a step's parts, in the colours of a priced step's lanes
    "products": (PRODUCTS, ["matmul"]),
    "through memory": (OTHERS, ["elementwise", "weights", "optimizer"]),
    "exposed": (MESSAGES, ["tensor", "context", "experts", "pipeline", "bubble", "data"]),
}


def parts_chart(*predictions: Prediction) -> Drawing:
    """A bar for each run: what share of its step each kind of part takes, by the formula."""
    left, wide, row = 130, 470, 30  # pixels
    lines, drawing = [], Drawing(left + wide + 20, 50 + row * len(predictions), "", "")
    for i, (kind, (fill, _)) in enumerate(KINDS.items()):
        drawing.box(left + 160 * i, 10, 13, 13, INK, fill, 0.6, radius=0)
        drawing.label(left + 160 * i + 19, 21, kind, 13, anchor="start")
    for i, (run, step, *_) in enumerate(predictions):
        top, x, shown = 40 + row * i, left, []
        drawing.label(left - 10, top + 16, run.name, 13, anchor="end")
        for kind, (fill, names) in KINDS.items():
            share = sum(step.parts[name] for name in names) / step.seconds
            drawing.box(x, top, wide * share, row - 8, INK, fill, 0.6, radius=0)
            ink = INK if fill == OTHERS else PAPER
            if share > 0.05:
                drawing.label(x + wide * share / 2, top + 16, f"{share:.0%}", 13, ink)
            shown.append(f"{kind} {share:.0%}")
            x += wide * share
        lines.append(f"{run.name}: {', '.join(shown)}")
    drawing.text = "\n".join(lines)
    drawing.alt = f"Of a step: {'; '.join(lines)}."
    return drawing


def bubble_of(name: str) -> list[float]:
    """Micro-batches per pipeline in a row of MegaScale's, and the bubble in per cent."""
    run = next(r for r in published.runs_of("MegaScale's baseline") if r.name == name)
    m = run.plan.micro_batches(run.batch)
    return [m, 100 * (run.plan.pp - 1) / (run.plan.interleaving * m)]
