"""Apparatus, not the lesson: a chart of parts, and tables of predictions."""

from statistics import median

from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.draw.drawing import INK, Drawing
from mgpu_tutorial.lab.table import formatted
from mgpu_tutorial.step_time import published
from mgpu_tutorial.step_time.published import Prediction

EARLY = [family for family in published.TABLES if family not in published.HELD_OUT]


KINDS = {  # a step's parts, told apart in grey too
    "products": ("#0b3d6b", ["matmul"]),
    "through memory": ("#9cc3e6", ["elementwise", "weights", "optimizer"]),
    "exposed": ("#f2b36b", ["tensor", "context", "experts", "pipeline", "bubble", "data"]),
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
            ink = "#ffffff" if kind == "products" else INK
            if share > 0.05:
                drawing.label(x + wide * share / 2, top + 16, f"{share:.0%}", 13, ink)
            shown.append(f"{kind} {share:.0%}")
            x += wide * share
        lines.append(f"{run.name}: {', '.join(shown)}")
    drawing.text = "\n".join(lines)
    drawing.alt = f"Of a step: {'; '.join(lines)}."
    return drawing


def fits_table() -> Table:
    """The fitted numbers, and the rows that told them; a borrowed number has brackets."""
    rows = []
    for family in published.TABLES:
        if names := [run.name for run in published.runs_of(family) if run.fitted]:
            gpu = published.gpu_of(family)
            passes = f"{gpu.activation_passes:.2f}"
            passes = f"({passes})" if len(names) == 1 else passes
            rows.append([family, gpu.name, gpu.matmul_efficiency, passes, ", ".join(names)])
    columns = {"program": "", "GPU": "", "share of the peak": ".1%", "passes": ""}
    return formatted(columns | {"fitted to": ""}, rows)


def scatter() -> tuple[dict, dict]:
    """For `curves`: per cent error of the seconds of each run that was not fitted.

    Over the published TFLOP/s per GPU, by the first word of the family.
    """
    marks = {}
    for family in EARLY:
        program = family.split()[0].rstrip(",").removesuffix("'s")
        xs, ys = marks.setdefault(program, ([], []))
        rows = free_rows(family)
        xs += [row.run.flops / row.run.seconds / 1e12 for row in rows]
        ys += [100 * row.error for row in rows]
    return marks, {"predicted as published": ([40, 600], [0, 0])}


def free_rows(family: str) -> list[Prediction]:
    """The predictions of a family that nothing was fitted to."""
    return [row for row in published.predict(family) if not row.run.fitted]


def worst_table() -> Table:
    """Per family the largest error of the runs that were not fitted, and the null guess's."""
    rows = []
    for family in EARLY:
        free = free_rows(family)
        worst = max(free, key=lambda row: abs(row.error))
        null = max((row.null_error for row in free), key=abs)
        rows.append([family, len(free), worst.error, worst.run.name, null])
    columns = {"runs of": "", "predicted": "", "largest error": "+.1%", "at": ""}
    return formatted(columns | {"largest of the null guess": "+.0%"}, rows)


def trust_table() -> Table:
    """By what changes against the fitted row: the errors of all rows that were not fitted."""
    found: dict[str, list[Prediction]] = {name: [] for name in published.CHANGES}
    for family in published.TABLES:
        for row in free_rows(family):
            found[published.change(family, row.run)].append(row)
    rows = []
    for name, free in found.items():
        ours, null = ([abs(row[i]) for row in free] for i in (2, 3))
        errors = [how(sizes) for sizes in (ours, null) for how in (median, max)]
        rows.append([name, len(free), *errors])
    columns = {"what changes": "", "runs": "", "half within": ".0%", "all within": ".0%"}
    return formatted(columns | {"null guess: half": ".0%", "null guess: all": ".0%"}, rows)


def bubble_of(name: str) -> list[float]:
    """Micro-batches per pipeline in a row of MegaScale's, and the bubble in per cent."""
    run = next(r for r in published.runs_of("MegaScale's baseline") if r.name == name)
    m = run.plan.micro_batches(run.batch)
    return [m, 100 * (run.plan.pp - 1) / (run.plan.interleaving * m)]


def alone(yours: float | None = None) -> Table:
    """Tokens/s per GPU of MPT 13B on 8 A100s: published, the reader's, ours, the null's."""
    large = published.predict("MPT on A100s")[1]
    asked, null = large.run, large.run.published / (1 + large.null_error)
    guesses = {"published": asked.published} | ({"yours": yours} if yours else {})
    guesses |= {"the formula": large.step.tokens_per_second, "null guess": null}
    rows = [[who, rate, asked.published / rate - 1] for who, rate in guesses.items()]
    columns = {"13B on 8": "", "tokens/s": ",.0f", "error of the seconds": "+.1%"}
    return formatted(columns, rows)
