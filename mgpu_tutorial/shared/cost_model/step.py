"""The seconds of a training step, by part.

part        what it is                                            see the chapter on
matmul      matrix products, at the share of the peak they reach  tensor parallelism
elementwise what lies between them, through the GPU's memory      tensor parallelism
weights     weights read, gradients added up, per micro-batch     pipelines
tensor      all-reduces of the tensor-parallel group              collectives
context     keys and values of the other parts of a sequence      collectives
experts     tokens to the ranks of their experts, and back        experts
pipeline    activations to the next stage                         pipelines
bubble      (p - 1) / v micro-batches in which a rank waits       pipelines
data        gradients, and parameters under ZeRO, not hidden      sharding
optimizer   its pass over the state                               sharding
fixed       what no batch makes shorter                           step time
"""

import math
from typing import NamedTuple

from mgpu_tutorial.shared.cost_model.links import all_gather_seconds, all_to_all_seconds
from mgpu_tutorial.shared.cost_model.machines import USABLE, Cluster, check_cluster
from mgpu_tutorial.shared.cost_model.plans import (
    WEIGHT,
    Memory,
    Model,
    Plan,
    memory_of,
    saved_bytes,
)

# Bytes per parameter through memory: Adam reads a gradient and reads and writes master
# weight and moments (28), writes 16-bit weights (6 with reading), and before it gradients
# are checked and scaled (8), their norm is taken (4), and they are set to zero (4).
OPTIMIZER_TRAFFIC = 50


class PredictedStep(NamedTuple):
    """A step of training, as `predict_step` expects it, with the seconds of its `parts`.

    `tflops` per GPU and `mfu` count the model's own operations, `hfu` also those that are
    computed again; `tokens_per_second` are per GPU, and `memory` is in bytes, by kind. The
    `bottleneck` is the largest part apart from the matrix products. A step that would need
    more than `USABLE` of a GPU's memory is priced too, and for it `fits` is False.
    """

    seconds: float
    parts: dict[str, float]
    tflops: float
    mfu: float
    hfu: float
    tokens_per_second: float
    memory: Memory
    bottleneck: str
    fits: bool


def predict_step(model: Model, cluster: Cluster, plan: Plan, batch: int) -> PredictedStep:
    """A step on a batch of so many sequences, for a rank with the mean share of layers.

    Raises ValueError where the plan cannot be run, as with more replicas than sequences, and
    for a cluster whose rates are not above 0. Whether it `fits` into memory the step tells.
    """
    check_cluster(cluster)
    return step_on(model, cluster, plan, batch)


def step_on(model: Model, cluster: Cluster, plan: Plan, batch: int) -> PredictedStep:
    """The same for any numbers of the GPU: a fit passes by shares of the peak below 0.

    It does so where the messages alone take longer than the measured step.
    """
    memory = memory_of(model, plan, batch)
    micro_batches = plan.micro_batches(batch)
    one = micro_batch_seconds(model, cluster, plan)
    slot = sum(one.values())
    under = 2 / 3 * slot if plan.overlap else 0.0  # the last micro-batch's backward
    if plan.zero == 3:  # under the compute of the whole step
        under = micro_batches * slot
    state = stage_parameters(model, plan)
    if plan.zero:
        state = model.parameters / (plan.tp * plan.pp * plan.shards)
    parts = {name: micro_batches * seconds for name, seconds in one.items()} | {
        "pipeline": micro_batches * pipeline_seconds(model, cluster, plan),
        "bubble": (plan.pp - 1) / plan.interleaving * slot,
        "data": exposed_seconds(data_seconds(model, cluster, plan, micro_batches), under),
        "optimizer": OPTIMIZER_TRAFFIC * state / cluster.memory_rate(),
        "fixed": cluster.fixed,
    }
    seconds = sum(parts.values())
    rate = batch * model.sequence / plan.ranks / seconds
    flops = rate * model.flops_per_token()
    return PredictedStep(
        seconds=seconds,
        parts=parts,
        tflops=flops / 1e12,
        mfu=flops / cluster.gpu.peak,
        hfu=rate * hardware_flops(model, plan) / cluster.gpu.peak,
        tokens_per_second=rate,
        memory=memory,
        bottleneck=max(list(parts)[1:], key=parts.get),
        fits=memory.total <= USABLE * cluster.gpu.memory,
    )


def hardware_flops(model: Model, plan: Plan) -> float:
    """Operations per token with those that are computed again."""
    scores = plan.recompute == "selective" and not plan.flash
    again = model.layers * model.attention_flops() * scores
    return model.flops_per_token(recompute=plan.recompute == "full") + again


def stage_parameters(model: Model, plan: Plan) -> float:
    """The mean parameters of a rank's part of the model, before ZeRO."""
    elsewhere = model.expert_parameters * (1 - 1 / plan.ep)
    return (model.parameters - elsewhere) / (plan.tp * plan.pp)


def exposed_seconds(communication: float, compute: float) -> float:
    """The seconds that communication adds to the compute that it overlaps with.

    Both at once take the root of the sum of squares: longer than the longer of the two,
    shorter than one after the other.
    """
    return math.hypot(compute, communication) - compute


def micro_batch_seconds(model: Model, cluster: Cluster, plan: Plan) -> dict[str, float]:
    """The seconds of forward and backward of one micro-batch on one rank, by part."""
    gpu, rate = cluster.gpu, cluster.memory_rate()
    tokens = plan.micro_batch * model.sequence / plan.cp
    layers = model.layers / plan.pp
    selective = plan.recompute == "selective"
    forward_passes = 2 if plan.recompute == "full" else 1
    # backward computes two products for each one of forward
    layer = (forward_passes + 2) * model.layer_flops()
    # flash attention computes the scores again in backward, selective recomputation before it
    score_passes = forward_passes + 2 + (0.5 if plan.flash else selective)
    layer += score_passes * model.attention_flops(causal=plan.flash)
    flops = layers * layer + 3 * model.head_flops() / plan.pp
    # each forward writes the activations and reads the weights, and backward reads both
    saved, again = saved_bytes(model, plan)
    moved = gpu.activation_passes * ((forward_passes + 1) * saved + selective * again)
    weights = (forward_passes + 1) * WEIGHT + 2 * plan.gradient_bytes
    sent = layer_messages(model, cluster, plan, tokens)
    return {
        "matmul": tokens * flops / plan.tp / (gpu.peak * gpu.matmul_efficiency),
        "elementwise": tokens * layers * moved / rate,
        "weights": weights * stage_parameters(model, plan) / rate,
    } | {name: layers * seconds for name, seconds in sent.items()}


def layer_messages(
    model: Model, cluster: Cluster, plan: Plan, tokens: float
) -> dict[str, float]:
    """The seconds of what a rank sends in one layer, forward and backward, by part.

    *tensor*: two all-reduces forward and two backward. With sequence parallelism each is a
    reduce-scatter and an all-gather, and the backward gathers two inputs once more.
    *context*: keys and values gathered forward, and their gradients added up backward.
    *experts*: tokens to their `active` experts and back, forward and backward, equally many
    to each. Recomputing a layer sends the forward's once more.
    """
    forwards, links = 2 if plan.recompute == "full" else 1, cluster.reached()
    nbytes = WEIGHT * tokens * model.hidden
    one_sum = 2 * all_gather_seconds(nbytes, plan.tp, cluster.gpus_per_node, *links)
    # ranks that share a matrix stand next to each other, those that share a sequence are
    # tp apart, and those that share the experts tp · cp
    per_node = max(1, cluster.gpus_per_node // plan.tp)
    apart = max(1, per_node // plan.cp)
    kept = 2 * WEIGHT * tokens * plan.cp * model.kv_width / plan.tp
    share = plan.tp if plan.sequence_parallel else 1  # of a token's width, on each rank
    exchange = all_to_all_seconds(nbytes * model.active / share, plan.ep, apart, *links)
    return {
        "tensor": (2 * forwards + 2 + plan.sequence_parallel) * one_sum,
        "context": (forwards + 1) * all_gather_seconds(kept, plan.cp, per_node, *links),
        "experts": 2 * (forwards + 1) * exchange,
    }


def pipeline_seconds(model: Model, cluster: Cluster, plan: Plan) -> float:
    """Activations and their gradients to the neighbours, for one micro-batch."""
    inside, between = cluster.reached()
    link = inside if plan.ranks <= cluster.gpus_per_node else between
    tokens = plan.micro_batch * model.sequence / plan.cp
    nbytes = WEIGHT * tokens * model.hidden / plan.tp
    messages = 2 * plan.interleaving * (plan.pp > 1)
    return messages * (link.latency + nbytes / link.bandwidth)


def data_seconds(model: Model, cluster: Cluster, plan: Plan, micro_batches: float) -> float:
    """The seconds of what the replicas send in a step.

    ZeRO 0 adds gradients up; ZeRO 1 and 2 scatter them and gather parameters once. ZeRO 3
    gathers each layer twice and scatters its gradients, for every micro-batch; in a
    pipeline, where that would be too much, parameters stay after the first gathering. An
    expert has fewer copies: one in each of the groups of `ep` ranks.
    """
    per_node = max(1, cluster.gpus_per_node // plan.tp) if plan.share_node else 1
    experts = model.expert_parameters / plan.ep / (plan.tp * plan.pp)
    dense = stage_parameters(model, plan) - experts
    together = min(plan.cp, per_node) * max(1, per_node // plan.cp // plan.ep)
    copies = plan.shards // plan.ep, together
    units = model.layers / plan.pp if plan.zero == 3 else 1

    def seconds(nbytes: float) -> float:
        """Of one gathering, or one scattering, of numbers of so many bytes."""
        found = 0.0
        for numbers, *ranks in (dense, plan.shards, per_node), (experts, *copies):
            if numbers:
                size = nbytes * numbers / units
                found += units * all_gather_seconds(size, *ranks, *cluster.reached())
        return found

    gather, scatter = seconds(WEIGHT), seconds(plan.gradient_bytes)
    if plan.zero == 0:
        return 2 * scatter
    if plan.zero < 3 or plan.pp > 1:
        return gather + scatter
    return micro_batches * (2 * gather + scatter)
