"""Which plan? All of them for a model, a cluster and a batch, ranked by their seconds."""

from collections.abc import Iterator
from typing import NamedTuple

from mgpu_tutorial.shared.cost_model.machines import Cluster
from mgpu_tutorial.shared.cost_model.models import Model
from mgpu_tutorial.shared.cost_model.plans import Plan
from mgpu_tutorial.shared.cost_model.step import PredictedStep, predict_step

TIE = 0.05  # about the error of a prediction where the program has a fitted row
USABLE = 0.90  # of the memory: what was measured is up to 9 % above the estimate
DAY = 86_400.0


class Choice(NamedTuple):
    """A plan that fits, and its step. `rank` is 1 for the best and all that tie with it."""

    rank: int
    plan: Plan
    step: PredictedStep


def divisors(number: int) -> list[int]:
    """All of them, the smallest first."""
    return [k for k in range(1, number + 1) if number % k == 0]


def plans(model: Model, cluster: Cluster, gpus: int, batch: int) -> Iterator[Plan]:
    """Every plan on just so many GPUs that can be run, whether it fits or not.

    Tensor-parallel groups may span two nodes. Micro-batches are powers of two up to 16, and
    the stages are equal.
    """
    for tp in divisors(gpus):
        if tp > 2 * cluster.gpus_per_node or model.heads % tp:
            continue
        for pp in divisors(gpus // tp):
            dp = gpus // tp // pp
            if equal_stages(model, pp) and batch % dp == 0:
                yield from variants(model, Plan(tp, pp, dp), batch)


def equal_stages(model: Model, stages: int) -> bool:
    """Whether the layers make so many equal stages, counting embedding and head or not."""
    layers = model.layers
    return (
        stages == 1
        or stages <= layers
        and (layers % stages == 0 or (layers + 2) % stages == 0)
    )


def variants(model: Model, plan: Plan, batch: int) -> Iterator[Plan]:
    """The same sizes with every micro-batch, interleaving, stage of ZeRO and recomputation.

    A pipeline with ZeRO 2 or 3 would add gradients up or gather for each micro-batch, so
    there only 0 and 1 are tried; and without replicas there is nothing to shard.
    """
    stages = (0,) if plan.dp == 1 else (0, 1) if plan.pp > 1 else (0, 1, 2, 3)
    for micro_batch in (1, 2, 4, 8, 16):
        if batch // plan.dp % micro_batch:
            continue
        pieces = batch // plan.dp // micro_batch
        turns = plan.pp > 1 and pieces % plan.pp == 0  # else there is no interleaving
        for v in range(1, 9 if turns else 2):
            if not equal_stages(model, plan.pp * v) and plan.pp * v != model.layers + 2:
                continue
            for zero in stages:
                for recompute in ("none", "selective", "full"):
                    yield plan._replace(
                        micro_batch=micro_batch,
                        interleaving=v,
                        zero=zero,
                        recompute=recompute,
                    )


def rank_plans(model: Model, cluster: Cluster, gpus: int, batch: int) -> list[Choice]:
    """The plans that fit, the fastest first; those within `TIE` of the first of a rank tie.

    Of each TP, PP, DP and ZeRO 3 or not, there is the fastest variant only. Raises
    ValueError for fewer than one GPU or sequence.
    """
    ranked: list[Choice] = []
    first = rank = 0
    for plan, step in fastest_that_fit(model, cluster, gpus, batch):
        if step.seconds > (1 + TIE) * first:
            first, rank = step.seconds, len(ranked) + 1
        ranked.append(Choice(rank, plan, step))
    return ranked


def fastest_that_fit(
    model: Model, cluster: Cluster, gpus: int, batch: int
) -> list[tuple[Plan, PredictedStep]]:
    """The fastest variant of each TP, PP, DP and ZeRO 3 or not, the fastest of all first."""
    if gpus < 1 or batch < 1:
        raise ValueError(f"gpus and batch must be 1 or more, got {gpus} and {batch}")
    found: dict[tuple, tuple[Plan, PredictedStep]] = {}
    for plan in plans(model, cluster, gpus, batch):
        step = predict_step(model, cluster, plan, batch)
        if step.memory.total > USABLE * cluster.gpu.memory:
            continue
        kind = plan.tp, plan.pp, plan.dp, plan.zero == 3
        if kind not in found or order(plan, step) < order(*found[kind]):
            found[kind] = plan, step
    return sorted(found.values(), key=lambda pair: order(*pair))


def order(plan: Plan, step: PredictedStep) -> tuple:
    """The fastest first; where that is equal, the plan with less to it."""
    return round(step.seconds, 9), plan.zero, plan.pp, plan.tp, plan.interleaving


def training(
    step: PredictedStep, tokens: float, gpus: int, price: float
) -> tuple[float, float]:
    """Days and cost of training on so many tokens, at a price per GPU and hour."""
    seconds = tokens / (step.tokens_per_second * gpus)
    return seconds / DAY, seconds / 3600 * gpus * price
