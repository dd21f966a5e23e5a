"""Which plan? All of them for a model, a cluster and a batch, ranked by their seconds."""

import math
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from mgpu_tutorial.shared.cost_model.machines import Cluster
from mgpu_tutorial.shared.cost_model.models import Model
from mgpu_tutorial.shared.cost_model.plans import RECOMPUTATIONS, Plan
from mgpu_tutorial.shared.cost_model.step import PredictedStep, predict_step

TIE = 0.05  # about the error of a prediction where the program has a fitted row
USABLE = 0.90  # of the memory: what was measured is up to 9 % above the estimate
DAY = 86_400.0
MICRO_BATCHES = (1, 2, 4, 8, 16)
INTERLEAVINGS = range(1, 9)


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
                for ep in divisors(math.gcd(dp, experts)):
                    if tp <= tensor and cp <= context:
                        found.append((tp, pp, cp, dp, ep))
    return found


def plans(
    model: Model, cluster: Cluster, gpus: int, batch: int, context: int = 1
) -> Iterator[Plan]:
    """Every plan on exactly `gpus` GPUs that can be run, whether it fits or not.

    Tensor-parallel groups may span two nodes, and up to `context` ranks share a sequence.
    Micro-batches are powers of two up to 16, and a rank has up to eight stages.
    """
    tensor = 2 * cluster.gpus_per_node
    for tp, pp, cp, dp, ep in splits(gpus, tensor, context, model.experts):
        sizes = Plan(tp, pp, dp, cp=cp, ep=ep)
        if can_share(model, sizes, batch):
            yield from variants(model, sizes, batch)


def variants(model: Model, sizes: Plan, batch: int) -> Iterator[Plan]:
    """The same sizes with every micro-batch, interleaving, ZeRO stage and recomputation."""
    for micro_batch, interleaving in product(MICRO_BATCHES, INTERLEAVINGS):
        plan = sizes._replace(micro_batch=micro_batch, interleaving=interleaving)
        if can_run(model, plan, batch):
            for zero, recompute in product(stages_of_zero(plan), RECOMPUTATIONS):
                yield plan._replace(zero=zero, recompute=recompute)


def can_share(model: Model, plan: Plan, batch: int) -> bool:
    """True where heads, layers, tokens and sequences divide into equal shares."""
    equal = equal_stages(model, plan.pp) and model.sequence % (2 * plan.cp) == 0  # zig-zag
    return equal and model.heads % plan.tp == 0 and batch % plan.dp == 0


def can_run(model: Model, plan: Plan, batch: int) -> bool:
    """True where micro-batches are whole, and a pipeline can interleave its stages."""
    micro_batches, rest = divmod(batch // plan.dp, plan.micro_batch)
    if rest:
        return False
    if plan.interleaving == 1:
        return True
    stages = plan.pp * plan.interleaving
    in_rounds = plan.pp > 1 and micro_batches % plan.pp == 0
    return in_rounds and (equal_stages(model, stages) or stages == model.layers + 2)


def equal_stages(model: Model, stages: int) -> bool:
    """True where the layers, with embedding and head or without, make equal stages."""
    divides = model.layers % stages == 0 or (model.layers + 2) % stages == 0
    return stages == 1 or stages <= model.layers and divides


def stages_of_zero(plan: Plan) -> tuple[int, ...]:
    """The stages of ZeRO to try.

    A pipeline with ZeRO 2 or 3 would add gradients up or gather for each micro-batch, so
    there only 0 and 1 are tried; without replicas there is nothing to shard.
    """
    if plan.shards == 1:
        return (0,)
    return (0, 1) if plan.pp > 1 else (0, 1, 2, 3)


def rank_plans(
    model: Model, cluster: Cluster, gpus: int, batch: int, context: int = 1
) -> list[Choice]:
    """The plans that fit, the fastest first; those within `TIE` of the first of a rank tie.

    Up to `context` ranks share a sequence, and ranks of DP share the experts.
    Of each TP, PP, CP, DP, EP and ZeRO 3 or not, there is the fastest variant only. Raises
    ValueError for fewer than one GPU or sequence.
    """
    ranked: list[Choice] = []
    first = rank = 0
    for plan, step in fastest_that_fit(model, cluster, gpus, batch, context):
        if step.seconds > (1 + TIE) * first:
            first, rank = step.seconds, len(ranked) + 1
        ranked.append(Choice(rank, plan, step))
    return ranked


def fastest_that_fit(
    model: Model, cluster: Cluster, gpus: int, batch: int, context: int
) -> list[tuple[Plan, PredictedStep]]:
    """The fastest variant of each mix and ZeRO 3 or not, the fastest of all first."""
    if gpus < 1 or batch < 1:
        raise ValueError(f"gpus and batch must be 1 or more, got {gpus} and {batch}")
    fastest: dict[tuple, tuple[Plan, PredictedStep]] = {}
    for plan in plans(model, cluster, gpus, batch, context):
        step = predict_step(model, cluster, plan, batch)
        if step.memory.total > USABLE * cluster.gpu.memory:
            continue
        kind = plan.tp, plan.pp, plan.cp, plan.dp, plan.ep, plan.zero == 3
        if kind not in fastest or order(plan, step) < order(*fastest[kind]):
            fastest[kind] = plan, step
    return sorted(fastest.values(), key=lambda pair: order(*pair))


def order(plan: Plan, step: PredictedStep) -> tuple:
    """The fastest first; where that is equal, the plan with less to it."""
    simple = plan.zero, plan.pp, plan.cp, plan.ep, plan.tp, plan.interleaving
    return round(step.seconds, 9), *simple


def training(
    step: PredictedStep, tokens: float, gpus: int, price: float
) -> tuple[float, float]:
    """Days and cost of training on `tokens` tokens, at a price per GPU and hour."""
    seconds = tokens / (step.tokens_per_second * gpus)
    return seconds / DAY, seconds / 3600 * gpus * price
