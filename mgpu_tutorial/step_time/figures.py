"""Apparatus, not the lesson: tables of parts, of predictions, and of a link."""

from collections.abc import Mapping, Sequence

from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.table import formatted
from mgpu_tutorial.lab.words import bytes_text
from mgpu_tutorial.shared.cost_model.step import PredictedStep
from mgpu_tutorial.step_time import predictions, published
from mgpu_tutorial.step_time.plain import alpha_beta
from mgpu_tutorial.step_time.predictions import Prediction

Lines = dict[str, tuple[Sequence[float], Sequence[float]]]  # for `curves`

MEASURED_GIB = (82.4, 67.0)  # of 96 GB: torchtitan's tables 1 and 3, without compiling
PROGRAMS = {
    "Megatron-LM": ("Megatron 2021, table 1", "Megatron 2021, table 2", "Megatron 2022"),
    "ZeRO-3 of 2021": ("ZeRO-3 of 2021",),
    "FSDP": ("MPT, FSDP", "torchtitan 8B"),
    "70B to 405B on H100s": ("Llama 3 405B", "torchtitan 405B", "NeMo on H100s"),
    "MegaScale's baseline": ("MegaScale's baseline",),
}

# Two nodes of 8 H100s: KiB of an all-reduce, and its bus bandwidth in GB/s, from
# https://github.com/aws-samples/awsome-distributed-training, micro-benchmarks/nccl-tests
TWO_NODES = {
    32: 0.55, 64: 0.91, 128: 2.26, 256: 3.84, 512: 7.95, 2**10: 15.95, 2**11: 26.70,
    2**12: 46.64, 2**13: 76.80, 2**14: 105.52, 2**15: 143.09, 2**16: 209.19, 2**17: 289.16,
    2**18: 342.81, 2**19: 393.34, 2**20: 436.95, 2**21: 443.72, 2**22: 465.87,
    2**23: 479.28, 2**24: 487.09,
}  # fmt: skip


def bubble_table() -> Table:
    """TFLOP/s of table 2: published, and from the first of each model by the bubble alone."""
    rows, first = [], {}
    for run in published.runs_of("Megatron 2021, table 2"):
        m = run.plan.micro_batches(run.batch)
        tflops, then = first.setdefault(run.name.split()[0], (run.published, m))
        alone = predictions.bubble_only(tflops, run.plan.pp, then, m)
        error = alone / run.published - 1
        rows.append([run.name, run.plan.pp, m, run.published, alone, error])
    formats = {"": "", "p": "", "m": ".0f", "published": ".0f"}
    return formatted(formats | {"by the bubble alone": ".1f", "error": "+.1%"}, rows)


def one_run() -> Prediction:
    """The run that the page works out: 175 billion parameters on 384 GPUs."""
    return predictions.predict("Megatron 2021, table 2")[0]


def parts_table(steps: Mapping[str, PredictedStep]) -> Table:
    """The share of each step that its parts take, in per cent: a column per step.

    Parts that take nothing in any of them are left out.
    """
    rows = []
    for name in next(iter(steps.values())).parts._fields:
        shares = [getattr(step.parts, name) / step.seconds for step in steps.values()]
        if any(shares):
            rows.append([name, *(f"{100 * share:.1f}" for share in shares)])
    rows.append(["seconds", *(f"{step.seconds:.2f}" for step in steps.values())])
    rows.append(["MFU", *(f"{step.mfu:.1%}" for step in steps.values())])
    rows.append(["HFU", *(f"{step.hfu:.1%}" for step in steps.values())])
    return Table(["% of a step", *steps], rows)


def selective_steps() -> dict[str, PredictedStep]:
    """The steps of table 5 with selective recomputation, by the model's size."""
    rows = predictions.predict("Megatron 2022")
    pairs = [(row.run.name.split(), row.step) for row in rows]
    return {size: step for (size, way), step in pairs if way == "selective"}


def scatter() -> tuple[Lines, Lines]:
    """For `curves`: hardware TFLOP/s per GPU of the rows not fitted, by program."""
    marks: Lines = {}
    for program, families in PROGRAMS.items():
        rows = [row for family in families for row in free_rows(family)]
        work = [predictions.operations(row.run) / 1e12 for row in rows]
        pairs = list(zip(work, rows, strict=True))
        measured = [flops / row.run.seconds for flops, row in pairs]
        marks[program] = measured, [flops / row.step.seconds for flops, row in pairs]
    ends = [40, 600]
    return marks, {"predicted as published": (ends, ends)}


def free_rows(family: str) -> list[Prediction]:
    """The predictions of a family that nothing was fitted to."""
    return [row for row in predictions.predict(family) if not row.run.fitted]


def fits_table() -> Table:
    """The fitted numbers, and the rows that told them; a borrowed number has brackets."""
    rows = []
    for family in published.TABLES.keys() - predictions.BORROWED.keys():
        gpu = predictions.gpu_of(family)
        names = ", ".join(run.name for run in predictions.fitted_runs(family))
        passes = f"{gpu.activation_passes:.2f}"
        if family not in predictions.TWO_NUMBERS:
            passes = f"({passes})"
        rows.append([family, gpu.name, gpu.matmul_efficiency, passes, names])
    rows.sort(key=lambda row: list(published.TABLES).index(row[0]))
    columns = {"program": "", "GPU": "", "share of the peak": ".1%", "passes": ""}
    return formatted(columns | {"fitted to": ""}, rows)


def family_table(family: str) -> Table:
    """Each row of a family: seconds, ours, and the two errors of the rate."""
    rows = []
    for row in predictions.predict(family):
        errors = [f"{row.error:+.1%}", f"{row.null_error:+.1%}"]
        errors = ["fitted", ""] if row.run.fitted else errors
        rows.append([row.run.name, str(row.run.plan), row.run.seconds, row.step.seconds])
        rows[-1] += errors
    columns = {family: "", "plan": "", "published s": ".2f", "predicted s": ".2f"}
    return formatted(columns | {"error": "", "null guess": ""}, rows)


def bubble_of(name: str) -> list[float]:
    """Micro-batches per pipeline in a row of MegaScale's, and the bubble in per cent."""
    run = next(r for r in published.runs_of("MegaScale's baseline") if r.name == name)
    m = run.plan.micro_batches(run.batch)
    return [m, 100 * (run.plan.pp - 1) / (run.plan.interleaving * m)]


def worst_table() -> Table:
    """Per family the largest error of the rows that were not fitted, and the null guess's."""
    rows = []
    for family in published.TABLES:
        free = free_rows(family)
        worst = max(free, key=lambda row: abs(row.error))
        null = max((row.null_error for row in free), key=abs)
        rows.append([family, len(free), worst.error, worst.run.name, null])
    columns = {"rate per GPU": "", "predicted rows": "", "largest error": "+.1%", "at": ""}
    return formatted(columns | {"largest of the null guess": "+.0%"}, rows)


def measured_memory() -> Table:
    """GB that torchtitan reports for Llama 3.1 8B, and ours."""
    rows = []
    for row, gib in zip(predictions.predict("torchtitan 8B"), MEASURED_GIB, strict=True):
        reported, ours = gib * 2**30 / 1e9, row.step.memory.total / 1e9
        rows.append([row.run.name, reported, ours, ours / reported - 1])
    columns = {"GB of a GPU": "", "reported": ".1f", "ours": ".1f", "error": "+.0%"}
    return formatted(columns, rows)


def link_table() -> Table:
    """Bus bandwidth of 16 GPUs: some published rows, and the same from two rows alone."""
    ends = [(kib * 2**10, TWO_NODES[kib] * 1e9) for kib in (2**10, 2**24)]
    alpha, beta = alpha_beta(*ends, ranks=16)
    rows = []
    for kib in (32, 2**8, 2**10, 2**11, 2**13, 2**15, 2**17, 2**20, 2**24):
        sent = 2 * 15 / 16 * kib * 2**10
        rate = sent / (alpha + sent / beta) / 1e9
        published_rate = TWO_NODES[kib]
        error = "fitted" if kib in (2**10, 2**24) else f"{rate / published_rate - 1:+.0%}"
        rows.append([bytes_text(kib * 2**10), published_rate, rate, error])
    return formatted({"": "", "published": ".1f", "by two rows": ".1f", "error": ""}, rows)
