"""Apparatus, not the lesson: a film, a map of plans, and a table of what a rank calls."""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mgpu_tutorial.at_scale.planner import Choice
from mgpu_tutorial.lab import Table, frame
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.words import bytes_text, in_a_row
from mgpu_tutorial.shared.cost_model.plans import Plan
from mgpu_tutorial.step_time import published
from mgpu_tutorial.step_time.published import Prediction

FRAME = "#E69F00"  # of the best plan, seen on a dark and on a pale cell
FORWARD = [
    "Two replicas: ranks 0, 1 and ranks 2, 3 compute on different sequences.",
    "TP: in every layer a pair adds up its products, inside the node.",
    "PP: the activations go to the next stage, once, on the other node.",
]
BACKWARD = [
    "Stage 2 computes the loss, and backward begins.",
    "TP again: forward and backward of each layer need two sums each.",
    "PP: the gradient of the activations goes back, and each rank has that of its part.",
]


def plan_film(rank: int, world_size: int) -> None:
    """A micro-batch of each replica on two nodes of four: TP 2 · PP 2 · DP 2, with a film."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    stage, _, half = mesh.get_coordinate()
    tp, dp = mesh["tp"].get_group(), mesh["dp"].get_group()
    pair, other = dist.get_process_group_ranks(tp), (rank + 4) % 8  # in the other stage
    x, bricks = torch.ones(2), {"model": f"{stage + 1}{'ab'[half]}"}

    def hold(slot: str, *of: int) -> None:
        """Parts of several ranks are added up."""
        bricks[slot] = "+".join(map(str, of))

    frame(
        "Ranks 0 to 3 are a node, 4 to 7 the other. A rank has half (a or b) of a stage.",
        bricks,
    )
    for slot, says in ("forward", FORWARD), ("backward", BACKWARD):
        works = stage == (slot == "backward")  # the last stage begins the backward
        if works:
            hold(slot, rank)
        frame(says[0], bricks)
        if works:
            dist.all_reduce(x, group=tp)
            hold(slot, *pair)
        frame(says[1], bricks)
        if works:
            dist.send(x, other)
        else:
            dist.recv(x, other)
            hold(slot, *((one + 4) % 8 for one in pair))
        if slot == "backward":
            hold("gradient", rank)
        frame(says[2], bricks)
    dist.all_reduce(x, group=dp)
    hold("gradient", *dist.get_process_group_ranks(dp))
    frame(
        "DP: once per step, ranks with the same part of the model average its gradients.",
        bricks,
    )


def plan_map(choices: Sequence[Choice], sizes: Sequence[int] = ()) -> Drawing:
    """The seconds of the best plan of each TP and PP, dark where it is fast.

    The best has a frame, and what ties with it a dotted one. A cell that would take more GPUs
    than there are says so. `sizes` are those of TP and PP to show, without them all that run.
    """
    if not choices:
        raise ValueError("no plan to draw: give what rank_plans returned")
    best: dict[tuple[int, int], Choice] = {}
    for choice in choices:  # the fastest first
        best.setdefault((choice.plan.tp, choice.plan.pp), choice)
    rows, columns = (sizes or sorted({key[i] for key in best}) for i in (0, 1))
    seconds = {
        key: choice.step.seconds
        for key, choice in best.items()
        if key[0] in rows and key[1] in columns
    }
    low, high = min(seconds.values()), max(seconds.values())
    first = choices[0]
    gpus, (_, *near) = first.plan.ranks, best.values()
    tied = [str(choice.plan) for choice in near if choice.rank == first.rank]
    table = [[f"TP {tp}"] for tp in rows]
    title = "Seconds of a step by TP and PP; DP, CP and ZeRO as they are best"
    wins = f"The best is {first.plan} with ZeRO {first.plan.zero}, {first.step.seconds:.1f} s"
    wins += f", and {in_a_row(tied)} ties with it" if len(tied) == 1 else ""
    wins += f", and {in_a_row(tied)} tie with it" if len(tied) > 1 else ""
    drawing = Drawing(90 + 96 * len(columns), 74 + 44 * len(rows), "", f"{title}. {wins}.")
    for j, pp in enumerate(columns):
        drawing.label(128 + 96 * j, 46, f"PP {pp}", weight="bold")
    drawing.label(12, 20, title, anchor="start")
    for i, tp in enumerate(rows):
        drawing.label(12, 80 + 44 * i, f"TP {tp}", anchor="start", weight="bold")
        for j, pp in enumerate(columns):
            found = seconds.get((tp, pp))
            none = f"> {gpus:,} GPUs" if tp * pp > gpus else "no plan"
            table[i].append(f"{found:.1f}" if found else none)
            slow = math.log(found / low) / (math.log(high / low) or 1) if found else 1.0
            fill = mixed(slow) if found else "#ffffff"
            ink = "#ffffff" if slow < 0.5 else INK
            place, dash = (82 + 96 * j, 56 + 44 * i), "" if found else "4 3"
            drawing.box(*place, 92, 40, FAINT, fill, 1, dash)
            drawing.label(place[0] + 46, place[1] + 25, table[i][-1], colour=ink)
            if found and best[tp, pp].rank == first.rank:
                dash = "" if best[tp, pp] is first else "3 3"
                inside = place[0] + 3, place[1] + 3, 86, 34
                drawing.box(*inside, FRAME, "none", 4 if not dash else 2.5, dash, 3)
    names = ["", *(f"PP {pp}" for pp in columns)]
    drawing.text = f"{title}\n{Table(names, table)}\n{wins}."
    return drawing


KINDS = {  # how the best plan shares out the work, told apart in grey too
    "the batch alone": "#e3eef7",
    "each layer or the pipeline too": "#9cc3e6",
    "no plan fits": "#ffffff",
}


def kind_of(plan: Plan | None) -> str:
    """The key of `KINDS` for a plan."""
    if plan is None:
        return "no plan fits"
    return list(KINDS)[plan.tp * plan.pp > 1]


def published_map(best: Mapping[tuple[float, int], Plan | None]) -> Drawing:
    """Published runs on the map of the best plans: what they ran, and how far off we are.

    `best` has the planner's plan for parameters and GPUs, or None where nothing fits. A run
    stands in the cell that is nearest by ratio. Of each program and kind of plan a cell shows
    the run that the formula of `step_time` misses by most, with the error of its seconds.
    Runs that a share was fitted to are left out, and experts, float8 and long sequences.
    """
    sizes, worlds = (sorted({key[i] for key in best}) for i in (0, 1))
    cells: dict[tuple, dict[str, Prediction]] = {}
    for family in published.TABLES:
        for row in published.predict(family):
            model, plan = row.run.model, row.run.plan
            odd = "float8" in family or family.startswith("torchtitan 405B")
            if row.run.fitted or odd or model.experts > 1 or model.sequence > 16_384:
                continue
            name = family.split()[0].rstrip(",").removesuffix("'s")
            name += ": " + (
                " · ".join(k for k in ("TP", "PP") if plan[k == "PP"] > 1) or "DP"
            )
            place = nearest(sizes, model.parameters), nearest(worlds, plan.ranks)
            found = cells.setdefault(place, {})
            found[name] = max(found.get(name, row), row, key=lambda one: abs(one.error))
    return drawn_map(best, sizes, worlds, cells)


def signed(error: float) -> str:
    """In per cent, with a sign; what rounds to nothing is +0%."""
    return f"{error:+.0%}".replace("-0%", "+0%")


def nearest(values: Sequence[float], value: float) -> float:
    """The one of `values` with the smallest ratio to a value."""
    return min(values, key=lambda one: abs(math.log(one / value)))


def drawn_map(
    best: Mapping, sizes: Sequence[float], worlds: Sequence[int], cells: Mapping
) -> Drawing:
    """The drawing of `published_map`: a cell has the plan, and under it the runs."""
    wide, lines = 150, []
    heights = [34 + 17 * max(1, *(len(cells.get((n, g), ())) for g in worlds)) for n in sizes]
    drawing = Drawing(70 + wide * len(worlds), 66 + sum(heights), "", "")
    for i, (kind, fill) in enumerate(KINDS.items()):
        drawing.box(70 + 230 * i, 8, 13, 13, INK, fill, 0.6, radius=0)
        drawing.label(70 + 230 * i + 19, 19, kind, 13, anchor="start")
    for j, gpus in enumerate(worlds):
        drawing.label(70 + wide * (j + 0.5), 50, f"{gpus:,} GPUs", weight="bold")
    top = 60
    for size, height in zip(sizes, heights, strict=True):
        drawing.label(60, top + 22, f"{size / 1e9:,.0f}B", anchor="end", weight="bold")
        for j, gpus in enumerate(worlds):
            plan, runs = best[size, gpus], cells.get((size, gpus), {})
            x, dash = 70 + wide * j, "4 3" if plan is None else ""
            drawing.box(
                x + 2, top, wide - 4, height - 4, FAINT, KINDS[kind_of(plan)], 1, dash
            )
            words = str(plan) if plan else "no plan fits"
            drawing.label(x + wide / 2, top + 18, words, 12, weight="bold")
            shown = [f"{name} {signed(row.error)}" for name, row in sorted(runs.items())]
            for k, text in enumerate(shown):
                drawing.label(x + wide / 2, top + 37 + 17 * k, text, 12)
            if shown:
                lines += [f"{size / 1e9:,.0f}B on {gpus:,} GPUs, {words}: {', '.join(shown)}"]
        top += height
    drawing.text = "\n".join(lines)
    drawing.alt = f"Published runs on the map of the best plans. {'; '.join(lines)}."
    return drawing


def mixed(share: float) -> str:
    """From dark blue (0) to a pale one (1), without those where an ink fails in a theme."""
    share = (0, 0.15, 0.3, 0.7, 0.85, 1)[min(int(6 * share), 5)]
    ends = (0x0B, 0x3D, 0x6B), (0xE3, 0xEE, 0xF7)
    channels = (round(a + share * (b - a)) for a, b in zip(*ends, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in channels)


def second_step(reports: Mapping[str, Report]) -> Table:
    """What a rank of each world calls, sends and computes in its second step.

    The reports are of `world.two_steps`. Bytes are those of the larger side: what all_gather
    returns and reduce_scatter is given.
    """
    rows = [["all_gather"], ["reduce_scatter"], ["all_reduce"]]
    rows += [["operations"], ["parameters kept"]]
    for report in reports.values():
        for row in rows[:3]:
            found = [e for e in events_of(report, "second") if e.op.startswith(row[0])]
            sizes = [e.nbytes * (len(e.group) if "scatter" in e.op else 1) for e in found]
            row.append(f"{len(found)} calls, {bytes_text(sum(sizes))}")
        operations, kept = report.results[0]
        rows[3].append(f"{operations / 1e6:,.1f} million")
        rows[4].append(f"{kept:,}")
    return Table(["a step of one rank", *reports], rows)
