"""Apparatus: losses of several plans, bytes by formula and counted, where a plan lies."""

from collections.abc import Mapping, Sequence

import torch

from mgpu_tutorial.lab import Table, curves
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.language_model import BATCH
from mgpu_tutorial.language_model.model import BLOCKS, CONTEXT, WIDTH
from mgpu_tutorial.language_model.plan import Plan, plan_of


def losses_plot(runs: Mapping[str, Sequence[float]]) -> Plot:
    """The losses over the steps: of the first run a line, of the others marks upon it."""
    series = {name: (range(1, len(run) + 1), run) for name, run in runs.items()}
    (first, line), *others = series.items()
    return curves(dict(others), {first: line}, "step", "loss", "linear")


def handed_over(report: Report, rank: int, op: str, group: Sequence[int] = ()) -> int:
    """The bytes that a rank gave to one kind of call in a step, in one group if named.

    Single numbers, the loss and the norm, don't count.
    """
    events = (e for e in report.events if e.rank == rank and e.op == op and e.nbytes > 8)
    total = sum(e.nbytes for e in events if not group or list(e.group) == list(group))
    return total // len(report.results[rank])


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
        plan = plan_of(name)
        numbers = int(report.stdout[0].split()[1].replace(",", ""))
        predicted = bytes_predicted(plan, numbers)
        inner = plan.cp * plan.tp
        dp, cp = range(0, plan.dp * inner, inner), range(0, inner, plan.tp)
        counted = {
            "tp": handed_over(report, 0, "all_reduce", range(plan.tp)) * (plan.tp > 1),
            "dp": handed_over(report, 0, "all_reduce", dp) * (plan.dp > 1)
            + handed_over(report, 0, "broadcast", dp),
            "pp": handed_over(report, 0, "isend"),
            "cp": handed_over(report, 0, "all_reduce", cp) * (plan.cp > 1),
        }
        rows.append(
            [name, f"{numbers:,}", *(f"{predicted[k]:,} / {counted[k]:,}" for k in counted)]
        )
    return Table(["plan", "numbers on rank 0", *counted], rows)


KINDS = {"character": "embedding", "position": "embedding", "scores": "head"}
KINDS |= {"attention": "attention", "mlp": "perceptron"}  # all others are norms
ROUNDING = 1e-14


def gradient_table(
    one: Mapping[str, torch.Tensor], others: Mapping[str, Mapping[str, torch.Tensor]]
) -> Table:
    """By kind of parameter: one process's largest gradient, and how far each plan is off."""
    kinds = {name: KINDS.get(name.split(".")[1], "norms") for name in one}
    names = list(dict.fromkeys(kinds.values()))

    def largest(sizes: Mapping[str, torch.Tensor]) -> list[float]:
        return [
            max(sizes[name].abs().max().item() for name in one if kinds[name] == kind)
            for kind in names
        ]

    rows = [["one process: largest", *(f"{size:.1e}" for size in largest(one))]]
    for plan, gradients in others.items():
        far = largest({name: gradients[name] - gradient for name, gradient in one.items()})
        shown = (f"< {ROUNDING:.0e}" if size < ROUNDING else f"{size:.0e}" for size in far)
        rows.append([plan, *shown])
    return Table(["off by at most", *names], rows)
