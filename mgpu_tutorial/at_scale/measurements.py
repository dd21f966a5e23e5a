"""Apparatus, not the lesson: the tables of the notebook, and what pretended ranks count."""

from collections.abc import Sequence

from mgpu_tutorial.at_scale import predictions, published
from mgpu_tutorial.at_scale.failures import HOUR, between_failures, lost
from mgpu_tutorial.at_scale.planner import Choice, rank_plans
from mgpu_tutorial.at_scale.questions import cards, mark
from mgpu_tutorial.at_scale.two_nodes import crossings, hierarchy_table, time_hierarchy
from mgpu_tutorial.at_scale.world import steps_of_one_rank
from mgpu_tutorial.lab import Table, pretend
from mgpu_tutorial.lab.words import bytes_text
from mgpu_tutorial.shared.cost_model.failures import best_interval
from mgpu_tutorial.shared.cost_model.links import (
    Link,
    hierarchical_seconds,
    ring_seconds,
    tree_seconds,
)
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS, Cluster
from mgpu_tutorial.shared.cost_model.memory import memory_of
from mgpu_tutorial.shared.cost_model.models import Model, model_of
from mgpu_tutorial.shared.cost_model.plans import Plan
from mgpu_tutorial.shared.cost_model.step import PredictedStep, predict_step

Lines = dict[str, tuple[Sequence[float], Sequence[float]]]  # for `curves`

MEASURED_GIB = (82.4, 67.0)  # torchtitan's tables 1 and 3, without compiling

# used through here
__all__ = ["cards", "crossings", "hierarchy_table", "mark", "time_hierarchy"]

# Sections 1 and 2: a step by its parts, and the published ones


def parts_table(steps: dict[str, PredictedStep]) -> Table:
    """What share of each step its parts take, in per cent: a column per step.

    Parts that take nothing in any of them are left out.
    """
    rows = []
    for name in next(iter(steps.values())).parts._fields:
        shares = [getattr(step.parts, name) / step.seconds for step in steps.values()]
        if any(shares):
            rows.append([name, *(f"{100 * share:.1f}" for share in shares)])
    for name, value in (
        ("seconds", lambda step: f"{step.seconds:.2f}"),
        ("MFU", lambda step: f"{step.mfu:.1%}"),
        ("HFU", lambda step: f"{step.hfu:.1%}"),
    ):
        rows.append([name, *map(value, steps.values())])
    return Table(["% of a step", *steps], rows)


def selective_steps() -> dict[str, PredictedStep]:
    """The steps of table 5 with selective recomputation, by the model's size."""
    rows = predictions.predict("table 5")
    names = (row.run.name.split() for row in rows)
    return {
        size: row.step
        for (size, way), row in zip(names, rows, strict=True)
        if way == "selective"
    }


def measured_memory() -> Table:
    """GiB that torchtitan reports for Llama 3.1 8B, and ours."""
    rows = []
    for row, gib in zip(predictions.predict("torchtitan 8B"), MEASURED_GIB, strict=True):
        ours = row.step.memory.total / 2**30
        rows.append([row.run.name, gib, f"{ours:.1f}", f"{ours / gib - 1:+.0%}"])
    return Table(["GiB of a GPU", "reported", "ours", "error"], rows)


def bubble_table() -> Table:
    """TFLOP/s of table 2: published, and from the first of each model by the bubble alone."""
    rows, first = [], {}
    for run in published.table_2():
        m = run.plan.micro_batches(run.batch)
        name = run.name.split()[0]
        first.setdefault(name, (run.published, m))
        tflops, then = first[name]
        found = predictions.bubble_only(tflops, run.plan.pp, then, m)
        error = found / run.published - 1
        figures = run.published, f"{found:.1f}", f"{error:+.1%}"
        rows.append([run.name, run.plan.pp, f"{m:.0f}", *figures])
    return Table(["", "p", "m", "published", "by the bubble alone", "error"], rows)


def prediction_table(*families: str) -> Table:
    """Published and predicted figures, a row per run; fitted rows are marked."""
    rows = []
    for family in families:
        for row in predictions.predict(family):
            run = row.run
            error = "fitted" if run.fitted else f"{row.error:+.1%}"
            places = 2 if run.unit == "s" else digits(run.published)
            figures = f"{run.published:,.{places}f}", f"{row.predicted:,.{places}f}"
            rows.append([f"{family}: {run.name}", *figures, run.unit, error])
    return Table(["run", "published", "predicted", "unit", "error"], rows)


def digits(figure: float) -> int:
    """Decimals that show a difference of a thousandth in a rate of this size."""
    return int(figure < 1000)


def strong_scaling() -> tuple[Lines, Lines]:
    """For `curves`: TFLOP/s of the 175B model by GPUs, published and predicted, two ways."""
    published_lines, predicted_lines = {}, {}
    for family, name in (("table 2", "TP and PP"), ("ZeRO-3", "ZeRO 3")):
        rows = [row for row in predictions.predict(family) if row.run.name.startswith("175B")]
        gpus = [row.run.plan.ranks for row in rows]
        published_lines[name] = gpus, [row.run.published for row in rows]
        predicted_lines[f"{name}, predicted"] = gpus, [row.predicted for row in rows]
    return published_lines, predicted_lines


def worst_table() -> Table:
    """The largest error of each family's rows that were not fitted, and their number."""
    rows = []
    for family in published.FAMILIES:
        free = [row for row in predictions.predict(family) if not row.run.fitted]
        row = max(free, key=lambda row: abs(row.error))
        rows.append([family, len(free), f"{row.error:+.1%}", row.run.name])
    return Table(["family", "rows not fitted", "largest error", "at"], rows)


def memory_table() -> Table:
    """GiB of a GPU: the authors' own figures, and ours for the same plans."""
    rows = []
    for name, figures in published.FIGURE_1.items():
        heads, hidden, layers, pp, batch, micro_batch, v, *_ = published.TABLE_5[name]
        model = Model(layers, hidden, heads)
        plain = Plan(8, pp, 1, micro_batch, v, **published.OLD)
        short = Plan(8, pp, 1, micro_batch, v, recompute="selective", flash=False)
        found = memory_of(model, plain, batch), memory_of(model, short, batch)
        state = sum(found[0][:3])
        ours = state, found[0].activations, working_apart(model, short, batch)
        cells = [
            f"{figure:.1f} / {nbytes / 2**30:.1f}"
            for figure, nbytes in zip(figures, ours, strict=True)
        ]
        rows.append([name, *cells])
    return Table(
        ["GiB, published / ours", "state", "activations", "sequence parallel, selective"],
        rows,
    )


def working_apart(model: Model, plan: Plan, batch: int) -> float:
    """Activations without what one layer holds while it computes again, as authors count."""
    scores = 5 * model.heads * model.sequence / plan.tp
    tokens = plan.micro_batch * model.sequence
    return memory_of(model, plan, batch).activations - scores * tokens


# Section 3: pretended ranks


def second_step(*meshes: tuple[int, int, int]) -> Table:
    """What a rank of each world (PP, DP, TP) calls, sends and computes in a step.

    A first step also computes shapes, which the counter takes for work, so the operations
    are those that a second one adds. The collectives of both steps are the same.
    """
    rows: dict[str, list] = {}
    for mesh in meshes:
        pp, dp, tp = mesh
        counts = [
            pretend(steps_of_one_rank, mesh, steps, world_size=pp * dp * tp)
            for steps in (1, 2)
        ]
        for call in ("all_gather", "reduce_scatter", "all_reduce"):
            calls = counts[1].calls[call] - counts[0].calls[call]
            nbytes = counts[1].nbytes[call] - counts[0].nbytes[call]
            rows.setdefault(call, []).append(f"{calls} calls, {bytes_text(nbytes)}")
        flops = counts[1].flops - counts[0].flops
        rows.setdefault("operations", []).append(f"{flops / 1e6:,.1f} million")
        kept = counts[1].returned["on this rank"]
        rows.setdefault("parameters kept", []).append(f"{kept:,}")
    worlds = [f"{pp * dp * tp:,} ranks" for pp, dp, tp in meshes]
    return Table(
        ["a step of one rank", *worlds], [[name, *row] for name, row in rows.items()]
    )


# Section 4: plans


def plan_table(choices: Sequence[Choice]) -> Table:
    """The ranked plans as an engineer reads them."""
    rows = []
    for choice in choices:
        plan, step = choice.plan, choice.step
        tie = sum(other.rank == choice.rank for other in choices) > 1
        rows.append(
            [
                f"{choice.rank}{'=' if tie else ''}",
                str(plan),
                f"ZeRO {plan.zero}",
                f"{plan.micro_batch} × {plan.interleaving}",
                plan.recompute,
                f"{step.seconds:.2f}",
                f"{step.tflops:.0f}",
                f"{step.mfu:.0%}",
                f"{step.memory.total / 1e9:.0f}",
                step.bottleneck,
            ]
        )
    head = ["rank", "plan", "state", "micro × v", "recompute"]
    head += ["s", "TFLOP/s", "MFU", "GB", "bottleneck"]
    return Table(head, rows)


def best_plans(
    billions: float, gpus: int, batch: int, between: float, per_node: int = 8
) -> Table:
    """For the sliders: the six best plans on H100s, `between` GB/s per GPU between nodes."""
    cluster = CLUSTERS["H100"]._replace(
        between=Link(5e-6, between * 1e9), gpus_per_node=per_node
    )
    choices = rank_plans(model_of(billions * 1e9, 4096), cluster, gpus, batch)
    if not choices:
        return Table(["no plan fits: more GPUs, or a batch that they divide"], [])
    return plan_table(choices[:6])


def compare_plans(
    model: Model, cluster: Cluster, batch: int, plans: dict[str, Plan]
) -> Table:
    """Some plans side by side: seconds, also with half the bytes a second between nodes,
    what limits each, and gigabytes."""
    link = cluster.between
    slower = cluster._replace(between=link._replace(bandwidth=link.bandwidth / 2))
    rows = []
    for name, plan in plans.items():
        step = predict_step(model, cluster, plan, batch)
        slow = f"{predict_step(model, slower, plan, batch).seconds:.2f}"
        fits = "" if step.fits else ", too many"
        memory = f"{step.memory.total / 1e9:.0f}{fits}"
        seconds = f"{step.seconds:.2f}"
        rows.append([name, seconds, slow, f"{step.mfu:.0%}", step.bottleneck, memory])
    head = ["plan", "s", "s, half the network", "MFU", "largest beside matmul", "GB"]
    return Table(head, rows)


# Section 5: failures, rings, trees and nodes


def failure_table(save: float, restart: float, worlds: Sequence[int]) -> Table:
    """Per number of GPUs: hours between failures, minutes between checkpoints, share lost."""
    rows = []
    for gpus in worlds:
        failure = between_failures(gpus)
        interval = best_interval(save, failure)
        loss = lost(save, restart, failure, interval)
        times = f"{failure / HOUR:.1f}", f"{interval / 60:.0f}"
        rows.append([f"{gpus:,}", *times, f"{loss.total:.1%}", f"{loss.restarting:.1%}"])
    head = ["GPUs", "hours between failures", "save every (min)", "time lost", "in restarts"]
    return Table(head, rows)


def lost_by_interval(
    save: float, restart: float, gpus: int, minutes: Sequence[float]
) -> Lines:
    """For `curves`: the per cent of the time lost for each interval, and of what."""
    failure = between_failures(gpus)
    found = [lost(save, restart, failure, 60 * m) for m in minutes]
    lines = {"in all": [100 * loss.total for loss in found]}
    lines["saving"] = [100 * loss.saving for loss in found]
    lines["repeating"] = [100 * loss.repeating for loss in found]
    return {name: (minutes, line) for name, line in lines.items()}


def all_reduce_table(sizes: Sequence[int], ranks: int, cluster: Cluster) -> Table:
    """Milliseconds of an all-reduce of each size (bytes) over so many GPUs, three ways."""
    inside, between = cluster.reached()
    per_node = cluster.gpus_per_node
    rows = []
    for size in sizes:
        ways = (
            ring_seconds(size, ranks, between),
            tree_seconds(size, ranks, between),
            hierarchical_seconds(size, ranks // per_node, per_node, inside, between),
        )
        rows.append([bytes_text(size), *(f"{1e3 * seconds:,.2f}" for seconds in ways)])
    return Table(["ms", "flat ring", "tree", "by node, then rings"], rows)
