"""Apparatus: the mesh of a plan, a step of it by dimension, its bytes, the logbook."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from copy import deepcopy
from itertools import pairwise, product
from types import SimpleNamespace
from typing import NamedTuple

import torch

from mgpu_tutorial import CHAPTERS, language_model
from mgpu_tutorial.at_scale.mesh_film import LINES
from mgpu_tutorial.instruments.prove.proof import Proof
from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.draw.drawing import FAINT, Drawing
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.lab.table import formatted
from mgpu_tutorial.lab.teach import mine
from mgpu_tutorial.language_model.model import BATCH, BLOCKS, CONTEXT, WIDTH
from mgpu_tutorial.language_model.plan import Plan, plan_of
from mgpu_tutorial.shared import logbook

LOOK = {  # of a dimension: its colour and hatch; what its ranks say to each other
    "tp": (LINES["tp"][0], "", "activations, in every block"),
    "pp": (LINES["pp"][0], "xx", "activations, and their gradients"),
    "dp": (LINES["dp"][0], "//", "gradients"),
}


def mesh_picture(words: str) -> Drawing:
    """The ranks of a plan of dp, tp and pp: a panel for a stage, and lines along the groups.

    Within a panel the ranks of a row share products, and those of a column the batch.
    """
    plan = plan_of(words)
    numbers = torch.arange(plan.ranks).view(plan.pp, plan.dp, plan.tp)
    groups = {
        "tp": numbers.flatten(0, 1).tolist(),
        "dp": numbers.transpose(1, 2).flatten(0, 1).tolist(),
        "pp": numbers.flatten(1).T.tolist(),
    }
    said = "\n".join(f"{name}: {', '.join(map(str, groups[name]))}" for name in LOOK)
    wide, panel = 130 * plan.tp, 130 * plan.tp + 70
    size = 20 + panel * plan.pp, 80 + 110 * plan.dp
    alt = f"The mesh of {words}, with a line along each group. {said}".replace("\n", "; ")
    picture = Drawing(*size, said, alt)
    for number, (name, (_, _, what)) in enumerate(LOOK.items()):
        x, y = 20 + 265 * number, size[1] - 14
        picture.line(x, y - 4, x + 34, y - 4, *LINES[name])
        picture.label(x + 42, y, f"{name}: {what}", 12, anchor="start")
    corner = {}
    for rank in range(plan.ranks):
        stage, row, column = (numbers == rank).nonzero()[0].tolist()
        corner[rank] = 29 + panel * stage + 130 * column, 58 + 110 * row
    for name, (colour, _, _) in LINES.items():
        for group in groups[name]:
            for one, other in pairwise(group):
                (x, y), (u, v) = corner[one], corner[other]
                if name == "pp":  # in an arc above or below the boxes
                    _arc(picture, x + 56, y, u + 56, colour)
                else:
                    ends = x + 56, y + 28, u + 56, v + 28
                    picture.line(*ends, *LINES[name])
    for stage in range(plan.pp):
        picture.box(22 + panel * stage, 28, wide + 6, 110 * plan.dp, FAINT, "none", 1)
        each = BLOCKS // plan.pp
        layers = f"stage {stage}: blocks {each * stage + 1} to {each * (stage + 1)}"
        layers += ", embedding" * (stage == 0) + ", head" * (stage == plan.pp - 1)
        picture.label(28 + panel * stage, 18, layers, 13, anchor="start", weight="bold")
    for rank, (x, y) in corner.items():
        _, row, column = (numbers == rank).nonzero()[0].tolist()
        picture.box(x, y, 112, 56)
        picture.label(x + 56, y + 18, f"rank {rank}", 13, weight="bold")
        picture.label(x + 56, y + 34, f"part {column} of {plan.tp}", 12)
        picture.label(x + 56, y + 49, f"sequences {row}, {row + plan.dp}, …", 11)
    return picture


def _arc(picture: Drawing, x: float, y: float, u: float, colour: str) -> None:
    """From the top of a box to the top of one in the next panel."""
    path = f"M{x:g} {y:g} C{x + 40:g} {y - 24:g} {u - 40:g} {y - 24:g} {u:g} {y:g}"
    style = f"stroke='{colour}' stroke-width='2' stroke-dasharray='2 3' fill='none'"
    picture.parts.append(f"<path d='{path}' {style}/>")


class Part(NamedTuple):
    """One call of a step: whose, for which dimension of the plan, and when, in seconds."""

    rank: int
    dimension: str
    meeting: tuple  # the same for all ranks of one call, and for both ends of a message
    begin: float
    end: float
    sends: bool


def calls_of(report: Report, rank: int, step: str) -> tuple[Event, list[Event]]:
    """The span of a step on one rank, and what this rank calls in it together with others."""
    mine = [e for e in report.events if e.rank == rank and e.kind not in ("note", "frame")]
    (span,) = [e for e in mine if e.kind == "span" and e.note == step]
    inside = [e for e in mine if e.kind != "span" and span.begin <= e.begin <= span.end]
    return span, [e for e in inside if len(e.group) > 1 or e.kind == "wait"]


def least_times(report: Report, ranks: range, steps: list[str]) -> list[tuple[float, float]]:
    """For each call of these ranks, the least time before it and the least time in it.

    They make the same calls in each step, so each time is the least of many.
    """
    rows = []
    for rank, step in product(ranks, steps):
        span, calls = calls_of(report, rank, step)
        ends = [span.begin, *(call.end for call in calls[:-1])]
        gaps = [call.begin - end for call, end in zip(calls, ends, strict=True)]
        inside = [(call.done or call.end) - call.begin for call in calls]
        rows.append(zip(gaps, inside, strict=True))
    columns = zip(*rows, strict=True)
    return [tuple(map(min, zip(*column, strict=True))) for column in columns]


def on_own_cores(report: Report, words: str) -> list[Part]:
    """The calls of the last step in the run's order, as if each rank had its own core.

    What is computed between two calls takes the least time that any rank of the stage took
    for it in any step but the first. A collective ends when the last of its ranks has come,
    and a `recv` when its message has been sent.
    """
    plan = plan_of(words)
    _, *steps = dict.fromkeys(e.note for e in report.events if e.kind == "span")
    each = plan.ranks // plan.pp
    stages = [range(first, first + each) for first in range(0, plan.ranks, each)]
    least = [least_times(report, ranks, steps) for ranks in stages]
    calls = [calls_of(report, rank, steps[-1])[1] for rank in range(plan.ranks)]
    apart = {1: "tp", plan.tp: "dp", plan.tp * plan.dp: "pp"}  # neighbours in their groups
    came, before = defaultdict(dict), None  # when each rank came to a meeting
    while came != before:  # until no rank comes later than in the round before
        before, parts = deepcopy(came), []
        for rank in range(plan.ranks):
            now, ends, counted = 0.0, {}, Counter()
            for call, (gap, inside) in zip(calls[rank], least[rank // each], strict=True):
                now += gap
                if call.kind == "wait":
                    now = max(now, ends.get(call.of, now))
                    continue
                if call.kind == "p2p":
                    step = abs(call.peer - rank)
                    road = (rank, call.peer) if call.sends else (call.peer, rank)
                else:
                    road, step = call.group, call.group[1] - call.group[0]
                meeting = call.kind, road, counted[road]
                counted[road] += 1
                came[meeting][rank] = now
                last = now if call.sends else max(came[meeting].values())
                ends[call.index] = last + inside
                parts.append(Part(rank, apart[step], meeting, now, last + inside, call.sends))
                now = now if call.done else last + inside
    return parts


def step_by_dimension(report: Report, words: str) -> Plot:
    """When each rank of a plan is in a call of tp, pp or dp in a step, and when it computes.

    The order is that of the run, the times are those of `on_own_cores`. A line leads from
    where a message was sent to where it was received.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    parts, ranks = on_own_cores(report, words), range(report.world_size)
    figure = Figure(figsize=(9, 0.9 + 0.42 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    last = max(part.end for part in parts)
    for rank in ranks:
        axes.broken_barh([(0, 1e3 * last)], (rank - 0.36, 0.72), facecolor="#e4e4e4")
    for part in parts:
        fill, hatch, _ = LOOK[part.dimension]
        look = {"facecolor": fill, "edgecolor": "white", "hatch": hatch, "linewidth": 0.4}
        bar = [(1e3 * part.begin, 1e3 * (part.end - part.begin))]
        axes.broken_barh(bar, (part.rank - 0.36, 0.72), **look)
    for sent in (part for part in parts if part.sends):
        (got,) = [p for p in parts if p.meeting == sent.meeting and not p.sends]
        ends = (1e3 * got.end, got.rank), (1e3 * sent.begin, sent.rank)
        arrow = {"arrowstyle": "->", "color": LOOK["pp"][0], "linewidth": 1.2}
        axes.annotate("", *ends, arrowprops=arrow)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(ranks, [f"rank {rank}" for rank in ranks])
    axes.set_xlabel("milliseconds, as if each rank had its own core")
    axes.spines[["top", "right"]].set_visible(False)
    patches = [Patch(facecolor="#e4e4e4", label="computes")]
    for name, (fill, hatch, what) in LOOK.items():
        look = {"facecolor": fill, "hatch": hatch, "edgecolor": "white"}
        patches.append(Patch(**look, label=f"{name}: {what}"))
    style = {"ncols": 4, "frameon": False, "fontsize": 9, "handlelength": 1.8}
    figure.legend(handles=patches, loc="outside upper left", **style)
    counts = Counter(part.dimension for part in parts)
    said = ", ".join(f"{counts[name]} for {name}" for name in LOOK)
    return Plot(figure, f"a step of {len(ranks)} ranks on {words}: calls: {said}")


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
        calls = [e for e in events_of(report, "step 0") if e.rank == 0 and len(e.group) > 1]
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
    "22 experts": "dp=4,ep=2",
}


def whole_logbook(proofs: Mapping[str, Proof]) -> Table:
    """The logbook's rows, and the proof by plan of a way that is a plan here.

    Plans that no chapter has priced come last.
    """
    first, *columns = logbook.COLUMNS
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


def credits(parts: SimpleNamespace) -> Table:
    """Each piece of the library that trains: what it does, its chapter, and whose it is."""
    rows = []
    for part in language_model.OURS:
        name, chapter = part.__name__, part.__module__.split(".")[1]
        whose = "yours" if mine.holds(getattr(parts, name)) else "ours"
        rows.append([name, ROLES[name], f"{CHAPTERS.index(chapter):02d}", whose])
    return Table(["piece", "what it does", "from", "whose"], rows)


ROLES = {
    "cut_model": "gives each stage its layers",
    "new_adam": "gives each rank what it steps",
    "take_step": "joins all of these in a step",
    "AccumulatingDDP": "averages gradients during backward",
    "order_of_1f1b": "says which micro-batch is next",
    "owners": "shares out Adam's moments",
    "sharded_step": "steps what is owned, and sends it",
    "fully_sharded": "gathers a layer just in time",
    "zigzag": "gives each rank early and late positions",
    "ring_attention": "lets keys and values travel",
    "ColumnParallelLinear": "has some outputs of a product",
    "RowParallelLinear": "has some summands of a product",
    "parallel_cross_entropy": "takes the loss of scores that are cut",
    "dispatch": "sends characters to their experts",
    "combine": "brings their answers home",
}
