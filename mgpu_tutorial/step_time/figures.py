"""Apparatus, not the lesson: tables of parts and of predictions, and rows of a link."""

from statistics import median

from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.table import formatted
from mgpu_tutorial.step_time import published
from mgpu_tutorial.step_time.published import Prediction

# Two nodes of 8 H100s: KiB of an all-reduce, and its bus bandwidth in GB/s per GPU: rows from
# https://github.com/aws-samples/awsome-distributed-training, micro-benchmarks/nccl-tests
TWO_NODES = {8: 0.19, 32: 0.55, 2**8: 3.84, 2**10: 15.95, 2**11: 26.70, 2**13: 76.80}
TWO_NODES |= {2**15: 143.09, 2**17: 289.16, 2**20: 436.95, 2**24: 487.09}

EARLY = [family for family in published.TABLES if family not in published.HELD_OUT]


def parts_table(*predictions: Prediction) -> Table:
    """What share of each step its parts take, but for those that take nothing in any."""
    steps, rows = [row.step for row in predictions], []
    for name in steps[0].parts:
        shares = [step.parts[name] / step.seconds for step in steps]
        if any(shares):
            rows.append([name, *(f"{100 * share:.1f}" for share in shares)])
    for name, how in ("seconds", ".2f"), ("MFU", ".1%"), ("HFU", ".1%"):
        rows.append([name, *(format(getattr(step, name.lower()), how) for step in steps)])
    return Table(["% of a step", *(row.run.name for row in predictions)], rows)


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
    """For `curves`: per cent error of the rate of each row that was not fitted.

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
    """Per family the largest error of the rows that were not fitted, and the null guess's."""
    rows = []
    for family in EARLY:
        free = free_rows(family)
        worst = max(free, key=lambda row: abs(row.error))
        null = max((row.null_error for row in free), key=abs)
        rows.append([family, len(free), worst.error, worst.run.name, null])
    columns = {"rate per GPU": "", "predicted rows": "", "largest error": "+.1%", "at": ""}
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
    columns = {"what changes": "", "rows": "", "half within": ".0%", "all within": ".0%"}
    return formatted(columns | {"null guess: half": ".0%", "null guess: all": ".0%"}, rows)


def bubble_of(name: str) -> list[float]:
    """Micro-batches per pipeline in a row of MegaScale's, and the bubble in per cent."""
    run = next(r for r in published.runs_of("MegaScale's baseline") if r.name == name)
    m = run.plan.micro_batches(run.batch)
    return [m, 100 * (run.plan.pp - 1) / (run.plan.interleaving * m)]
