"""The best mix of sharding and tensor parallelism, in closed form."""

import math

from mgpu_tutorial.shared.cost_model.machines import Cluster
from mgpu_tutorial.shared.cost_model.plans import Model, Plan
from mgpu_tutorial.shared.cost_model.step import predict_step


def exposed_seconds(tp: float, gather: float, summing: float, compute: float) -> float:
    """What a layer exposes if `tp` ranks share each matrix, and FSDP all the rest.

    `gather` are the seconds to gather a layer's parameters and scatter its gradients at TP 1,
    which hide under `compute`; `summing` those that each further rank of TP adds.
    """
    return summing * (tp - 1) + max(0, gather / tp - compute)


def best_mix(gpus: int, gather: float, summing: float, compute: float) -> tuple[float, float]:
    """The ranks of FSDP and of TP that expose the least, whole numbers or not."""
    hides = gather / compute  # TP at which gathering just hides
    equal = math.sqrt(gather / summing)  # TP at which a rank more costs what it saves
    tp = max(1, min(hides, equal))
    return gpus / tp, tp


def layer_seconds(
    model: Model, cluster: Cluster, tokens: float
) -> tuple[float, float, float]:
    """A layer's seconds to gather, to sum for one more rank of TP, and to compute.

    For `tokens` per GPU, with parameters that each GPU fetches alone.
    """
    nvlink, network = (link.bandwidth for link in cluster.reached())
    weights, gpu = model.layer_parameters, cluster.gpu
    gather = 8 * weights / network
    summing = 20 * tokens * model.hidden / nvlink
    compute = 6 * weights * tokens / (gpu.peak * gpu.matmul_efficiency)
    return gather, summing, compute


def planned(
    model: Model, cluster: Cluster, gpus: int, tokens: int, share_node: bool
) -> dict[int, float]:
    """The formula's seconds of a step by TP, with FSDP over the rest, fitting or not.

    Sequences are as long as a GPU's tokens, so that a group of TP takes one for each rank.
    """
    short, steps = model._replace(sequence=tokens), {}
    for tp in 1, 2, 4, 8:
        plan = Plan(tp=tp, dp=gpus // tp, micro_batch=tp, zero=3, share_node=share_node)
        steps[tp] = predict_step(short, cluster, plan, batch=gpus).seconds
    return steps
