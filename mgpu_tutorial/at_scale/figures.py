"""Apparatus, not the lesson: a film, and the tables."""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mgpu_tutorial.at_scale import fewer
from mgpu_tutorial.at_scale.failures import HOUR, between_failures, lost
from mgpu_tutorial.at_scale.planner import Choice, rank_plans
from mgpu_tutorial.at_scale.pretend import pretend
from mgpu_tutorial.at_scale.world import share_out, steps_of_one_rank
from mgpu_tutorial.lab import Table, frame, launch
from mgpu_tutorial.lab.table import formatted
from mgpu_tutorial.lab.words import bytes_text
from mgpu_tutorial.shared.cost_model.failures import best_interval
from mgpu_tutorial.shared.cost_model.links import (
    hierarchical_seconds,
    ring_seconds,
    tree_seconds,
)
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS, Cluster
from mgpu_tutorial.shared.cost_model.models import Model, model_of
from mgpu_tutorial.shared.cost_model.plans import Plan
from mgpu_tutorial.shared.cost_model.step import predict_step

# Pretended ranks


def second_step(*meshes: tuple[int, int, int]) -> Table:
    """What a rank of each world (PP, DP, TP) calls, sends and computes in a step.

    A first step also computes shapes, which the counter takes for work, so the operations
    are those that a second one adds. The collectives of both steps are the same.
    """
    columns = []
    for mesh in meshes:
        once, twice = (
            pretend(steps_of_one_rank, share_out, mesh, steps, world_size=math.prod(mesh))
            for steps in (1, 2)
        )
        column = []
        for call in ("all_gather", "reduce_scatter", "all_reduce"):
            calls = twice.calls[call] - once.calls[call]
            nbytes = twice.nbytes[call] - once.nbytes[call]
            column.append(f"{calls} calls, {bytes_text(nbytes)}")
        column.append(f"{(twice.flops - once.flops) / 1e6:,.1f} million")
        column.append(f"{twice.returned['on this rank']:,}")
        columns.append(column)
    names = ["all_gather", "reduce_scatter", "all_reduce", "operations", "parameters kept"]
    worlds = [f"{math.prod(mesh):,} ranks" for mesh in meshes]
    rows = [list(row) for row in zip(names, *columns, strict=True)]
    return Table(["a step of one rank", *worlds], rows)


# Plans


def plan_film(rank: int, world_size: int) -> None:
    """A micro-batch of each replica on two nodes of four: TP 2 · PP 2 · DP 2, with a film."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    stage, _, half = mesh.get_coordinate()
    groups = {name: mesh[name].get_group() for name in ("tp", "dp")}
    pair = dist.get_process_group_ranks(groups["tp"])
    x, model = torch.ones(2), {"model": (f"{stage + 1}{'ab'[half]}", 2 * stage + half)}

    def say(says: str, **parts: Sequence[int]) -> None:
        """Parts of several ranks, added up, have the colour of the first."""
        bricks = {slot: ("+".join(map(str, of)), of[0]) for slot, of in parts.items() if of}
        frame(says, model | bricks)

    say("Ranks 0 to 3 are a node, 4 to 7 the other. A rank has half (a or b) of a stage.")
    ours = [rank] if stage == 0 else []
    say(
        "Two replicas: ranks 0, 1 and ranks 2, 3 compute on different sequences.",
        forward=ours,
    )
    if stage == 0:
        dist.all_reduce(x, group=groups["tp"])
        ours = pair
    say("TP: in every layer a pair adds up its products, inside the node.", forward=ours)
    if stage == 0:
        dist.send(x, rank + 4)
    else:
        dist.recv(x, rank - 4)
        ours = [other - 4 for other in pair]
    say("PP: the activations go to the next stage, once, on the other node.", forward=ours)
    back = [rank] if stage == 1 else []
    says = "Stage 2 computes the loss, and backward begins."
    say(says, forward=ours, backward=back)
    if stage == 1:
        dist.all_reduce(x, group=groups["tp"])
        back = pair
    says = "TP again: forward and backward of each layer need two sums each."
    say(says, forward=ours, backward=back)
    if stage == 1:
        dist.send(x, rank - 4)
    else:
        dist.recv(x, rank + 4)
        back = [other + 4 for other in pair]
    says = (
        "PP: the gradient of the activations goes back, and each rank has that of its part."
    )
    say(says, forward=ours, backward=back, gradient=[rank])
    dist.all_reduce(x, group=groups["dp"])
    both = dist.get_process_group_ranks(groups["dp"])
    says = "DP: once per step, ranks with the same part of the model average its gradients."
    say(says, forward=ours, backward=back, gradient=both)


def plan_table(choices: Sequence[Choice]) -> Table:
    """The ranked plans as an engineer reads them; plans that tie have an equals sign."""
    rows = []
    for rank, plan, step in choices:
        ties = sum(other.rank == rank for other in choices) > 1
        row = [f"{rank}=" if ties else f"{rank}", str(plan), f"ZeRO {plan.zero}"]
        row += [f"{plan.micro_batch} × {plan.interleaving}", plan.recompute]
        row += [step.seconds, step.tflops, step.mfu, step.memory.total / 1e9]
        rows.append([*row, step.bottleneck])
    columns = {"place": "", "plan": "", "state": "", "micro × v": "", "recompute": ""}
    columns |= {"s": ".2f", "TFLOP/s": ".0f", "MFU": ".0%", "GB": ".0f", "bottleneck": ""}
    return formatted(columns, rows)


def playground(first: Mapping[str, float], **choices: Sequence[float]) -> None:
    """The best plans of the setting `first`, and of each that the sliders are moved to.

    Without widgets (a web page, print) the plans of the first setting stand there.
    """
    import ipywidgets as widgets
    from IPython.display import display

    look = {"style": {"description_width": "initial"}, "continuous_update": False}
    sliders = {
        name: widgets.SelectionSlider(
            description=name, options=values, value=first[name], **look
        )
        for name, values in choices.items()
    }

    def move(_: object) -> None:
        place.update(best_plans(**{name: slider.value for name, slider in sliders.items()}))

    setting = ", ".join(f"{name} = {slider.value}" for name, slider in sliders.items())
    still = f"with {setting} (run this cell to get the controls)"
    caption = {"text/plain": still, "text/html": f"<p><i>{still}</i></p>"}
    row = widgets.HBox([*sliders.values()], layout=widgets.Layout(flex_flow="row wrap"))
    display(row._repr_mimebundle_() | caption, raw=True)
    place = display(best_plans(**first), display_id=True)
    for slider in sliders.values():
        slider.observe(move, names="value")


def best_plans(
    billion_parameters: float,
    gpus: int,
    sequences: int,
    gb_per_s_between: float,
    gpus_per_node: int,
) -> Table:
    """For the sliders: the six best plans on H100s."""
    cluster = with_network(CLUSTERS["H100"], gb_per_s_between)
    cluster = cluster._replace(gpus_per_node=gpus_per_node)
    model = model_of(billion_parameters * 1e9, 4096)
    choices = rank_plans(model, cluster, gpus, sequences)
    if not choices:
        return Table(["no plan fits: more GPUs, or a batch that they divide"], [])
    return plan_table(choices[:6])


def with_network(cluster: Cluster, gigabytes: float) -> Cluster:
    """The same cluster with `gigabytes` per second, GPU and direction between its nodes."""
    return cluster._replace(between=cluster.between._replace(bandwidth=gigabytes * 1e9))


def compare_plans(
    model: Model, cluster: Cluster, batch: int, plans: Mapping[str, Plan]
) -> Table:
    """Some plans side by side: seconds, also with half the bytes a second between nodes,
    what limits each, and gigabytes."""
    slower = with_network(cluster, cluster.between.bandwidth / 2e9)
    rows = []
    for name, plan in plans.items():
        step = predict_step(model, cluster, plan, batch)
        slow = predict_step(model, slower, plan, batch)
        memory = f"{step.memory.total / 1e9:.0f}{'' if step.fits else ', too many'}"
        rows.append([name, step.seconds, slow.seconds, step.mfu, step.bottleneck, memory])
    columns = {"plan": "", "s": ".2f", "s, half the network": ".2f", "MFU": ".0%"}
    return formatted(columns | {"largest beside matmul": "", "GB": ""}, rows)


# Fewer messages


def fewer_table(intervals: Sequence[int]) -> Table:
    """How often four ranks average, what each sends, and how far it leads from averaging
    the gradients of every step, which one process can do."""
    by_ddp, rows = one_process(), []
    for every in intervals:
        report = launch(fewer.local_sgd, 4, every, trace=True)
        nbytes = sum(e.nbytes for e in report.events if e.rank == 0 and e.op == "all_reduce")
        far = (report.results[0] - by_ddp).abs().max().item()
        rows.append([every, f"{nbytes:,}", f"{far:.3f}" if far > 1e-12 else "only rounding"])
    return Table(["averaged every", "bytes of a rank", "farthest from DDP"], rows)


def one_process(ranks: int = 4, steps: int = 8) -> torch.Tensor:
    """The same model, data and SGD, with the mean gradient of all ranks' data each time."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
    )
    model = model.double()
    generators = [torch.Generator().manual_seed(rank) for rank in range(ranks)]
    for _ in range(steps):
        xs = [torch.randn(32, 16, generator=g, dtype=torch.float64) for g in generators]
        x = torch.cat(xs)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


# Failures, rings, trees and nodes


def failure_table(save: float, restart: float, worlds: Sequence[int]) -> Table:
    """Per number of GPUs: hours between failures, minutes between checkpoints, share lost."""
    rows = []
    for gpus in worlds:
        failure = between_failures(gpus)
        interval = best_interval(save, failure)
        loss = lost(save, restart, failure, interval)
        rows.append([f"{gpus:,}", failure / HOUR, interval / 60, sum(loss), loss[2]])
    columns = {"GPUs": "", "hours between failures": ".1f", "save every (min)": ".0f"}
    return formatted(columns | {"time lost": ".1%", "in restarts": ".1%"}, rows)


def all_reduce_table(sizes: Sequence[int], ranks: int, cluster: Cluster) -> Table:
    """Milliseconds of an all-reduce of each size (bytes) over `ranks` GPUs, three ways."""
    inside, between = cluster.reached()
    per_node = cluster.gpus_per_node
    rows = []
    for size in sizes:
        seconds = (
            ring_seconds(size, ranks, between),
            tree_seconds(size, ranks, between),
            hierarchical_seconds(size, ranks // per_node, per_node, inside, between),
        )
        rows.append([bytes_text(size), *(1e3 * value for value in seconds)])
    columns = {"ms": "", "flat ring": ",.2f", "tree": ",.2f", "by node, then rings": ",.2f"}
    return formatted(columns, rows)
