"""Apparatus: losses of several plans, and their bytes by formula and counted."""

from collections import Counter
from collections.abc import Mapping, Sequence

from mgpu_tutorial.instruments.prove.proof import Proof
from mgpu_tutorial.lab import Table, curves
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.table import formatted
from mgpu_tutorial.language_model.model import BATCH, BLOCKS, CONTEXT, WIDTH
from mgpu_tutorial.language_model.plan import Plan, plan_of
from mgpu_tutorial.shared import logbook


def losses_plot(runs: Mapping[str, Sequence[float]]) -> Plot:
    """The losses over the steps: of the first run a line, of the others marks upon it."""
    series = {name: (range(1, len(run) + 1), run) for name, run in runs.items()}
    (first, line), *others = series.items()
    return curves(dict(others), {first: line}, "step", "loss", "linear")


def bytes_predicted(plan: Plan, numbers: int) -> dict[str, int]:
    """What a rank of the first stage sends in a step, with `numbers` float64 parameters.

    tp: an all-reduce of the activations twice forward and twice backward, in each of its
    blocks and micro-batches; where it has the head, once more backward, and three numbers a
    character for the loss. gradients: an all-reduce of its own along dp and cp, and with
    ZeRO 1 a reduce, and broadcasts of the new parameters. pp: its activations. cp: in each
    block keys and values to all others forward, and their gradients backward.
    """
    sequences, blocks = BATCH // plan.dp, BLOCKS // plan.pp
    rows = sequences * CONTEXT // plan.cp * 8  # a number for each of its characters
    activations, head = rows * WIDTH, rows * (WIDTH + 3) * (plan.pp == 1)
    return {
        "tp": (blocks * 4 * activations + head) * (plan.tp > 1),
        "gradients": numbers * 8 * (plan.dp * plan.cp > 1) * (1 + (plan.zero == 1)),
        "pp": activations * (plan.pp > 1),
        "cp": blocks * 2 * 2 * (plan.cp - 1) * activations // plan.tp,
    }


def plan_table(reports: Mapping[str, Report]) -> Table:
    """A row for each plan of four ranks, in float64: bytes a step by formula and counted."""
    rows = []
    for name, report in reports.items():
        plan, numbers = plan_of(name), int(report.stdout[0].split()[1].replace(",", ""))
        predicted, counted = bytes_predicted(plan, numbers), Counter()
        tp, cp = (*range(plan.tp),), (*range(0, plan.cp * plan.tp, plan.tp),)
        calls = [e for e in events_of(report, "step 1") if e.rank == 0 and len(e.group) > 1]
        for e in calls:
            if e.op == "isend":
                counted["cp" if plan.cp > 1 and e.group == cp else "pp"] += e.nbytes
            elif e.op in ("all_reduce", "reduce", "broadcast") and e.nbytes > 8:  # no loss
                counted["tp" if plan.tp > 1 and e.group == tp else "gradients"] += e.nbytes
        cells = [f"{predicted[n]:,} / {counted[n]:,}" for n in predicted]
        rows.append([name, f"{numbers:,}", *cells])
    return Table(["plan", "numbers on rank 0", *predicted], rows)


PLANS = {  # what a chapter's way is here
    "08 in buckets": "dp=2",
    "15 ZeRO 3": "dp=2,zero=3",
    "18 1F1B": "pp=2",
    "19 tensor parallel": "tp=2",
    "22 experts": "dp=2,ep=2",
    "26 ZeRO 1": "dp=2,zero=1",
}


def whole_logbook(proofs: Mapping[str, Proof]) -> Table:
    """The logbook's rows, and the proof by plan of a way that is a plan here.

    Plans that no chapter has priced come last.
    """
    first, *columns = [*logbook.COLUMNS]
    head = [first, *columns[:2], "plan here", "its proof", *columns[2:]]
    rows, left = [], {plan: logbook.said(proof) for plan, proof in proofs.items()}
    for way, whose, equal, *numbers in formatted(logbook.COLUMNS, logbook.whole()).rows:
        plan = PLANS.get(way, "")
        here = [plan.replace(",", ", "), left.pop(plan, "")]
        rows.append([way, whose, equal, *here, *numbers])
    blank = [""] * (len(head) - 5)
    for plan, said in left.items():
        rows.append(["26", "", "", plan.replace(",", ", "), said, *blank])
    return Table(head, rows)
