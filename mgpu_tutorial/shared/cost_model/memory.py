"""The bytes of the fullest GPU, by kind.

State as in the chapter on sharding, activations as in the one on pipelines: the first stage
holds as many micro-batches as there are stages. What a layer saves is counted as in
https://arxiv.org/abs/2205.05198.
"""

from typing import NamedTuple

from mgpu_tutorial.shared.cost_model.models import Model
from mgpu_tutorial.shared.cost_model.plans import Plan

WEIGHT, OPTIMIZER = 2, 12  # bytes per parameter: 16-bit weights; master weights and moments
LOGIT = 6  # bytes per logit: in 16 bits, and in 32 for the loss


class Memory(NamedTuple):
    """Bytes of one GPU: `gathered` is what ZeRO 3 has unsharded, `logits` are the loss's."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    logits: float

    @property
    def total(self) -> float:
        """All of them together."""
        return sum(self)


class Activations(NamedTuple):
    """Bytes that one token of one layer saves for backward, before ranks share them.

    `matmul` are the inputs of the matrix products, and `scores` those of the attention.
    `elementwise` lies between the matrix products: only sequence parallelism shares it.
    """

    elementwise: float
    matmul: float
    scores: float


def saved_activations(model: Model, flash: bool) -> Activations:
    """What a layer saves: 10 h, 24 h and 5 a s bytes per token in a plain GPT."""
    h = model.hidden
    dropout = 0 if model.gated else 2 * h
    attention = 2 * h + 2 * (h + 2 * model.kv_width)
    mlp = model.active * (6 if model.gated else 4) * model.ffn_width
    if model.experts > 1:  # each expert keeps what it was sent
        mlp += model.active * 2 * h
    scores = 0 if flash else 5 * model.heads * model.sequence
    return Activations(8 * h + dropout, attention + mlp, scores)


def recomputed_activations(model: Model, flash: bool) -> Activations:
    """What selective recomputation computes again instead of saving it: the scores.

    Flash attention saves no scores. Then it is what is as cheap to compute again: the
    outputs of the norms and of the activation function.
    """
    saved = saved_activations(model, flash)
    if saved.scores:
        return Activations(0, 0, saved.scores)
    return Activations(4 * model.hidden, 2 * model.active * model.ffn_width, 0)


def by_rank(layer: Activations, plan: Plan) -> Activations:
    """The part that a rank of the tensor-parallel group has."""
    elementwise = layer.elementwise / (plan.tp if plan.sequence_parallel else 1)
    return Activations(elementwise, layer.matmul / plan.tp, layer.scores / plan.tp)


def stage_parameters(model: Model, plan: Plan) -> float:
    """The mean parameters of a rank's part of the model, before ZeRO."""
    elsewhere = model.expert_parameters * (1 - 1 / plan.ep)
    return (model.parameters - elsewhere) / (plan.tp * plan.pp)


def memory_of(model: Model, plan: Plan, batch: int) -> Memory:
    """The bytes of a GPU of the first stage, which holds the most micro-batches."""
    experts = model.expert_parameters / plan.pp / plan.tp
    per_stage = model.layers * model.layer_parameters / plan.pp
    ends = model.embedding_parameters / (1 if plan.pp == 1 or model.tied else 2)
    dense = (per_stage + ends) / plan.tp - experts
    cut = [plan.shards if plan.zero >= stage else 1 for stage in (3, 2, 1)]
    kinds = (WEIGHT, plan.gradient_bytes, OPTIMIZER)
    # plan.ep ranks share the experts in any case, and ZeRO their copies
    state = [
        nbytes * (dense / ranks + experts / max(ranks, plan.ep))
        for nbytes, ranks in zip(kinds, cut, strict=True)
    ]
    elsewhere = model.expert_parameters / model.layers * (1 - 1 / plan.ep)
    unit = (model.layer_parameters - elsewhere) / plan.tp
    # a layer that computes, its gradient, and the next layer on the way
    gathered = unit * (2 * WEIGHT + plan.gradient_bytes) if plan.zero == 3 else 0.0
    tokens = plan.micro_batch * model.sequence / plan.cp
    logits = LOGIT * tokens * model.vocabulary / plan.tp if plan.pp == 1 else 0.0
    return Memory(*state, activations(model, plan, batch), gathered, logits)


def activations(model: Model, plan: Plan, batch: int) -> float:
    """Bytes that the first stage saves for backward, of all micro-batches in flight."""
    tokens = plan.micro_batch * model.sequence / plan.cp
    saved = sum(by_rank(saved_activations(model, plan.flash), plan))
    working = 0.0
    if plan.recompute == "selective":
        working = sum(by_rank(recomputed_activations(model, plan.flash), plan))
        saved -= working
    elif plan.recompute == "full":  # the input of each layer, and one layer while it is done
        working = saved
        saved = 2 * model.hidden / (plan.tp if plan.sequence_parallel else 1)
    in_flight = min(plan.micro_batches(batch), plan.pp) / plan.pp
    if plan.interleaving > 1:
        in_flight *= 1 + (plan.pp - 1) / (plan.pp * plan.interleaving)
    return tokens * (saved * model.layers * in_flight + working)
