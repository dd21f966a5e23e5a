"""Which plan? All of them for a model, a cluster and a batch, ranked by their seconds."""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from mgpu_tutorial.lab.table import Table, formatted
from mgpu_tutorial.shared.cost_model.machines import SHARES, USABLE, Cluster, check_cluster
from mgpu_tutorial.shared.cost_model.plans import RECOMPUTATIONS, Model, Plan, check_model
from mgpu_tutorial.shared.cost_model.step import PredictedStep, predict_step
from mgpu_tutorial.shared.guards import positive, whole

TIE = 0.05  # about the error of a prediction where the program has a fitted run
SLOWER = 0.10  # the largest of these errors, where GPUs, width or TP are other ones


class Choice(NamedTuple):
    """A plan that fits, and its step. `rank` is 1 for the best and all that tie with it."""

    rank: int
    plan: Plan
    step: PredictedStep


def divisors(number: int) -> list[int]:
    """The divisors of a number, the smallest first."""
    return [k for k in range(1, number + 1) if number % k == 0]


def splits(gpus: int, tensor: int, context: int, experts: int) -> list[tuple[int, ...]]:
    """Every (TP, PP, CP, DP, EP) whose product, EP left out, is the number of GPUs.

    TP is at most `tensor` and CP at most `context`. The experts are shared out over ranks of
    DP, so EP divides DP, and the experts.
    """
    found = []
    for tp in divisors(gpus):
        for pp in divisors(gpus // tp):
            for cp in divisors(gpus // tp // pp):
                dp = gpus // tp // pp // cp
                for ep in divisors(dp):
                    if tp <= tensor and cp <= context and experts % ep == 0:
                        found.append((tp, pp, cp, dp, ep))
    return found


def plans(
    model: Model, cluster: Cluster, gpus: int, batch: int, context: int = 1
) -> Iterator[Plan]:
    """Every plan on exactly `gpus` GPUs that can be run, whether it fits or not.

    Tensor-parallel groups may span two nodes, and up to `context` ranks share a sequence. A
    pipeline with ZeRO 2 or 3 would add gradients up or gather for each micro-batch, so there
    only 0 and 1 are tried; without replicas there is nothing to shard.
    """
    check_model(model)
    check_cluster(cluster)
    for name, size in {"gpus": gpus, "batch": batch, "context": context}.items():
        whole(name, size)
    gpus, batch, context = int(gpus), int(batch), int(context)  # 8.0 is 8
    tensor = 2 * cluster.gpus_per_node
    for tp, pp, cp, dp, ep in splits(gpus, tensor, context, model.experts):
        zeros = range(1 if dp * cp == 1 else 2 if pp > 1 else 4)
        chunks = range(1, 9 if pp > 1 else 2)
        for micro_batch, interleaving in product((1, 2, 4, 8, 16), chunks):
            plan = Plan(tp, pp, dp, micro_batch, interleaving, cp=cp, ep=ep)
            if can_run(model, plan, batch):
                for zero, recompute in product(zeros, RECOMPUTATIONS):
                    yield plan._replace(zero=zero, recompute=recompute)


def can_run(model: Model, plan: Plan, batch: int) -> bool:
    """True where heads, tokens, sequences and layers divide into equal shares.

    Stages may count embedding and head as layers. An interleaved pipeline takes its
    micro-batches in rounds of `pp`, and may give embedding and head a stage of their own.
    """
    interleaved = plan.interleaving > 1
    rounds = plan.pp if interleaved else 1
    stages = plan.pp * plan.interleaving
    return (
        model.heads % plan.tp == 0
        and (plan.cp == 1 or model.sequence % (2 * plan.cp) == 0)  # zig-zag
        and batch % (plan.dp * plan.micro_batch * rounds) == 0
        and (model.layers % stages == 0 or (model.layers + 2) % stages == 0)
        and (interleaved or stages <= model.layers)
    )


def rank_plans(
    model: Model, cluster: Cluster, gpus: int, batch: int, context: int = 1
) -> list[Choice]:
    """The plans that fit, the fastest first; those within `TIE` of the first of a rank tie.

    Of each TP, PP, CP, DP, EP and ZeRO 3 or not, there is the fastest variant only. The list
    is empty where none fits, or none gives every GPU an equal share.
    """
    fastest: dict[tuple, tuple[Plan, PredictedStep]] = {}
    for plan in plans(model, cluster, gpus, batch, context):
        one = plan, predict_step(model, cluster, plan, batch)
        if one[1].memory.total <= USABLE * cluster.gpu.memory:
            kind = plan.tp, plan.pp, plan.cp, plan.dp, plan.ep, plan.zero == 3
            fastest[kind] = min(fastest.get(kind, one), one, key=order)
    ranked: list[Choice] = []
    first = rank = 0
    for plan, step in sorted(fastest.values(), key=order):
        if step.seconds > (1 + TIE) * first:
            first, rank = step.seconds, len(ranked) + 1
        ranked.append(Choice(rank, plan, step))
    return ranked


def order(one: tuple[Plan, PredictedStep]) -> tuple:
    """The fastest first; where that is equal, the plan with less to it."""
    plan, step = one
    simple = plan.zero, plan.pp, plan.cp, plan.ep, plan.tp, plan.interleaving
    return round(step.seconds, 9), *simple


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


def shares(cluster: Cluster, plan: Plan) -> tuple[float, float]:
    """The lowest and the highest share of the peak that programs with such plans reach.

    A GPU that was fitted to a step of yours is not in `SHARES`: it has its own share, twice.
    """
    own = cluster.gpu.matmul_efficiency
    batch_alone, cut = SHARES.get(cluster.gpu, ((own, own), (own, own)))
    return cut if plan.tp * plan.pp > 1 else batch_alone


def spread(model: Model, cluster: Cluster, plan: Plan, batch: int) -> tuple[float, float]:
    """The seconds of a step as the fastest of these programs would take it, and the slowest.

    The slow end has `SLOWER` on top, by which a prediction can be too fast even where the
    program has a fitted run.
    """
    seconds = []
    for share in shares(cluster, plan):
        gpu = cluster.gpu._replace(matmul_efficiency=share)
        step = predict_step(model, cluster._replace(gpu=gpu), plan, batch)
        seconds.append(step.seconds)
    slow, fast = seconds
    return fast, (1 + SLOWER) * slow


def with_network(cluster: Cluster, gigabytes: float) -> Cluster:
    """The same cluster with `gigabytes` per second, GPU and direction between its nodes."""
    positive("gigabytes", gigabytes)
    return cluster._replace(between=cluster.between._replace(bandwidth=gigabytes * 1e9))
