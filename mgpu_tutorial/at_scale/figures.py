"""Apparatus, not the lesson: a film, and the tables."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mgpu_tutorial.at_scale import averaging, world
from mgpu_tutorial.at_scale.planner import Choice
from mgpu_tutorial.lab import Table, frame, launch
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.table import formatted
from mgpu_tutorial.lab.words import bytes_text
from mgpu_tutorial.shared.cost_model import links
from mgpu_tutorial.shared.cost_model.failures import best_interval
from mgpu_tutorial.shared.cost_model.machines import Cluster
from mgpu_tutorial.shared.cost_model.plans import Model, Plan
from mgpu_tutorial.shared.cost_model.step import predict_step
from mgpu_tutorial.shared.models import SmallTransformer

STAGE = partial(SmallTransformer, vocabulary=512, width=1024, heads=8, depth=2)
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
    x, bricks = torch.ones(2), {"model": (f"{stage + 1}{'ab'[half]}", 2 * stage + half)}

    def hold(slot: str, *of: int) -> None:
        """Parts of several ranks, added up, have the colour of the first."""
        bricks[slot] = "+".join(map(str, of)), of[0]

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


def with_network(cluster: Cluster, gigabytes: float) -> Cluster:
    """The same cluster with `gigabytes` per second, GPU and direction between its nodes."""
    if not gigabytes > 0:
        raise ValueError(f"a network of {gigabytes} GB/s carries nothing: take more than 0")
    return cluster._replace(between=cluster.between._replace(bandwidth=gigabytes * 1e9))


def compare_plans(
    model: Model, cluster: Cluster, batch: int, plans: Mapping[str, Plan]
) -> Table:
    """Some plans side by side: seconds, also with half the bytes a second between nodes,
    what limits each, and gigabytes."""
    slower = with_network(cluster, cluster.between.bandwidth / 2e9)
    rows = []
    for name, plan in plans.items():
        step, slow = (predict_step(model, c, plan, batch) for c in (cluster, slower))
        row = [name, step.seconds, slow.seconds, step.mfu, step.bottleneck]
        rows.append([*row, step.memory.total / 1e9])
    columns = {"plan": "", "s": ".2f", "s, half the network": ".2f", "MFU": ".0%"}
    return formatted(columns | {"largest beside matmul": "", "GB": ".0f"}, rows)


def second_step(*meshes: tuple[int, int, int]) -> Table:
    """What a rank of each world (PP, DP, TP) calls, sends and computes in its second step.

    Bytes are those of the larger side: what all_gather returns and reduce_scatter is given.
    """
    how = {"backend": "none", "device": "cpu", "trace": True}
    rows = [["all_gather"], ["reduce_scatter"], ["all_reduce"]]
    rows += [["operations"], ["parameters kept"]]
    for mesh in meshes:
        report = launch(world.two_steps, 1, mesh, STAGE, **how)
        for row in rows[:3]:
            found = [e for e in events_of(report, "second") if e.op.startswith(row[0])]
            sizes = [e.nbytes * (len(e.group) if "scatter" in e.op else 1) for e in found]
            row.append(f"{len(found)} calls, {bytes_text(sum(sizes))}")
        operations, kept = report.results[0]
        rows[3].append(f"{operations / 1e6:,.1f} million")
        rows[4].append(f"{kept:,}")
    worlds = [f"{math.prod(mesh):,} ranks" for mesh in meshes]
    return Table(["a step of one rank", *worlds], rows)


def failure_table(save: float, restart: float, worlds: Sequence[int]) -> Table:
    """Per number of GPUs: hours between failures, minutes between checkpoints, share lost.

    `save` and `restart` are in seconds. A GPU fails as often as in Llama 3's run: 419 times
    in 54 days on 16,384 of them (https://arxiv.org/abs/2407.21783, table 5).
    """
    rows = []
    for gpus in worlds:
        links.require_whole("GPUs", gpus)
        failure = 54 * 86_400 / 419 * 16_384 / gpus
        interval = best_interval(save, failure)
        lost = save / interval + interval / 2 / failure + restart / failure
        rows.append([f"{gpus:,}", failure / 3600, interval / 60, lost, restart / failure])
    columns = {"GPUs": "", "hours between failures": ".1f", "save every (min)": ".0f"}
    return formatted(columns | {"time lost": ".1%", "in restarts": ".1%"}, rows)


def all_reduce_table(sizes: Sequence[int], ranks: int, cluster: Cluster) -> Table:
    """Milliseconds of an all-reduce of each size (bytes) over `ranks` GPUs, three ways."""
    if ranks % cluster.gpus_per_node:
        why = f"take a multiple of the {cluster.gpus_per_node} of a node"
        raise ValueError(f"{ranks} GPUs leave a node in part empty: {why}")
    inside, between = cluster.reached()
    nodes, rows = (ranks // cluster.gpus_per_node, cluster.gpus_per_node), []
    for size in sizes:
        ring = links.ring_seconds(size, ranks, between)
        tree = links.tree_seconds(size, ranks, between)
        by_node = links.hierarchical_seconds(size, *nodes, inside, between)
        rows.append([bytes_text(size), 1e3 * ring, 1e3 * tree, 1e3 * by_node])
    columns = {"ms": "", "flat ring": ",.2f", "tree": ",.2f", "by node, then rings": ",.2f"}
    return formatted(columns, rows)


def fewer_table(intervals: Sequence[int]) -> Table:
    """How often four ranks average, what each sends, and how far it leads from DDP."""
    generator, rows = torch.Generator().manual_seed(0), []
    data = torch.randn(4, 8, 32, 16, generator=generator, dtype=torch.float64)
    whole = data.transpose(0, 1).reshape(1, 8, 4 * 32, 16)
    # one rank with all the data has the gradients that DDP averages
    by_ddp = launch(averaging.local_sgd, 1, 1, whole, device="cpu").results[0]
    for every in intervals:
        report = launch(averaging.local_sgd, 4, every, data, device="cpu", trace=True)
        nbytes = sum(e.nbytes for e in report.events if e.rank == 0 and e.op == "all_reduce")
        far = (report.results[0] - by_ddp).abs().max().item()
        rows.append([every, f"{nbytes:,}", f"{far:.3f}" if far > 1e-12 else "only rounding"])
    return Table(["averaged every", "bytes of a rank", "farthest from DDP"], rows)
