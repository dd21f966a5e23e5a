"""Apparatus: losses of several plans, and their bytes by formula and counted."""

from collections import Counter
from collections.abc import Mapping, Sequence

from mgpu_tutorial.lab import Table, curves
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.language_model.plan import Plan, plan_of


def losses_plot(runs: Mapping[str, Sequence[float]]) -> Plot:
    """The losses over the steps: of the first run a line, of the others marks upon it."""
    series = {name: (range(1, len(run) + 1), run) for name, run in runs.items()}
    (first, line), *others = series.items()
    return curves(dict(others), {first: line}, "step", "loss", "linear")


def bytes_predicted(plan: Plan, numbers: int) -> dict[str, int]:
    """What a rank of the first stage hands over in a step, with `numbers` float64 parameters.

    tp: an all-reduce of the activations twice forward and twice backward, in each of its
    blocks and micro-batches. dp: an all-reduce of its gradients, and with ZeRO 1 broadcasts
    of the new parameters. pp: its activations. cp: an all-reduce of the keys and values of
    whole sequences forward and one backward, and one of its gradients.
    """
    whole = 16 // plan.dp * 64 * 64 * 8  # activations of whole sequences
    share, four = whole // plan.cp, 4 * 4 // plan.pp  # in each of four blocks
    gradients = numbers * 8
    return {
        "tp": four * share * (plan.tp > 1),
        "dp": gradients * (plan.dp > 1) * (1 + plan.zero),
        "pp": share * (plan.pp > 1),
        "cp": (four * whole // plan.tp + gradients) * (plan.cp > 1),
    }


def plan_table(reports: Mapping[str, Report]) -> Table:
    """A row for each plan of four ranks, in float64: bytes a step by formula and counted."""
    rows = []
    for name, report in reports.items():
        plan, numbers = plan_of(name), int(report.stdout[0].split()[1].replace(",", ""))
        predicted, counted = bytes_predicted(plan, numbers), Counter()
        inner = plan.cp * plan.tp
        of_group = {
            (*range(plan.tp),): "tp",
            (*range(0, inner, plan.tp),): "cp",
            (*range(0, plan.dp * inner, inner),): "dp",
        }
        calls = [e for e in report.events if e.rank == 0 and len(e.group) > 1]
        for e in calls:
            if e.op in ("isend", "all_reduce", "broadcast") and e.nbytes > 8:  # no loss, norm
                counted["pp" if e.op == "isend" else of_group[e.group]] += e.nbytes
        steps = len(report.results[0])
        cells = [f"{predicted[n]:,} / {counted[n] // steps:,}" for n in predicted]
        rows.append([name, f"{numbers:,}", *cells])
    return Table(["plan", "numbers on rank 0", *predicted], rows)
