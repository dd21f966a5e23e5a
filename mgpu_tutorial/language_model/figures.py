"""Apparatus: losses of several plans, and their bytes by formula and counted."""

from collections.abc import Mapping, Sequence

from mgpu_tutorial.lab import Table, curves
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.language_model.model import BATCH, BLOCKS, CONTEXT, WIDTH
from mgpu_tutorial.language_model.plan import Plan, plan_of


def losses_plot(runs: Mapping[str, Sequence[float]]) -> Plot:
    """The losses over the steps: of the first run a line, of the others marks upon it."""
    series = {name: (range(1, len(run) + 1), run) for name, run in runs.items()}
    (first, line), *others = series.items()
    return curves(dict(others), {first: line}, "step", "loss", "linear")


def bytes_predicted(plan: Plan, numbers: int, itemsize: int = 8) -> dict[str, int]:
    """What a rank of the first stage hands over in a step, with `numbers` parameters.

    tp: an all-reduce of the activations twice forward and twice backward, in each of its
    blocks and micro-batches. dp: an all-reduce of its gradients, and with ZeRO 1 broadcasts
    of the new parameters. pp: its activations. cp: an all-reduce of the keys and values of
    whole sequences forward and one backward, and one of its gradients.
    """
    whole = BATCH // plan.dp * CONTEXT * WIDTH * itemsize  # one activation of whole sequences
    share = whole // plan.cp
    keys = 4 * BLOCKS // plan.pp * whole // plan.tp
    return {
        "tp": 4 * BLOCKS // plan.pp * share * (plan.tp > 1),
        "dp": numbers * itemsize * (plan.dp > 1) * (1 + plan.zero),
        "pp": share * (plan.pp > 1),
        "cp": (keys + numbers * itemsize) * (plan.cp > 1),
    }


def plan_table(reports: Mapping[str, Report]) -> Table:
    """A row for each plan of four ranks, in float64: bytes a step by formula and counted."""
    rows = []
    for name, report in reports.items():
        plan, steps = plan_of(name), len(report.results[0])
        numbers = int(report.stdout[0].split()[1].replace(",", ""))
        predicted = bytes_predicted(plan, numbers)
        inner = plan.cp * plan.tp
        groups = {"tp": range(plan.tp), "cp": range(0, inner, plan.tp)}
        groups["dp"] = range(0, plan.dp * inner, inner)
        counted = dict.fromkeys(predicted, 0)
        for e in report.events:
            if e.rank == 0 and e.nbytes > 8 and len(e.group) > 1:  # not the loss, the norm
                if e.op == "isend":
                    counted["pp"] += e.nbytes
                elif e.op in ("all_reduce", "broadcast"):
                    counted[next(n for n in groups if (*groups[n],) == (*e.group,))] += (
                        e.nbytes
                    )
        cells = [f"{predicted[n]:,} / {counted[n] // steps:,}" for n in predicted]
        rows.append([name, f"{numbers:,}", *cells])
    return Table(["plan", "numbers on rank 0", *predicted], rows)
