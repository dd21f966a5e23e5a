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


def saved_bytes(model: Model, plan: Plan) -> tuple[float, float]:
    """What a rank saves of a token in one layer, and what selective recomputation repeats.

    In a plain GPT 10 h bytes lie between the matrix products, and only sequence parallelism
    shares them; 24 h are the inputs of the products, and 5 a s the scores of the attention.
    Selective recomputation repeats the scores. Flash attention saves none; then it repeats
    what is as cheap: the outputs of the norms and of the activation function.
    """
    h, ffn = model.hidden, model.active * model.ffn_width
    between = 8 * h if model.gated else 10 * h  # without dropout, or with
    inputs = 4 * h + 4 * model.kv_width + (6 if model.gated else 4) * ffn
    if model.experts > 1:  # each expert keeps what it was sent
        inputs += model.active * 2 * h
    scores = 5 * model.heads * model.sequence
    shared = plan.tp if plan.sequence_parallel else 1
    if plan.flash:
        return between / shared + inputs / plan.tp, 4 * h / shared + 2 * ffn / plan.tp
    return between / shared + (inputs + scores) / plan.tp, scores / plan.tp


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
    state = []
    for stage, nbytes in (3, WEIGHT), (2, plan.gradient_bytes), (1, OPTIMIZER):
        ranks = plan.shards if plan.zero >= stage else 1
        # plan.ep ranks share the experts in any case, and ZeRO their copies
        state.append(nbytes * (dense / ranks + experts / max(ranks, plan.ep)))
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
    saved, again = saved_bytes(model, plan)
    working = 0.0
    if plan.recompute == "selective":
        working = again
        saved -= again
    elif plan.recompute == "full":  # the input of each layer, and one layer while it is done
        working = saved
        saved = 2 * model.hidden / (plan.tp if plan.sequence_parallel else 1)
    in_flight = min(plan.micro_batches(batch), plan.pp) / plan.pp
    if plan.interleaving > 1:
        in_flight *= 1 + (plan.pp - 1) / (plan.pp * plan.interleaving)
    return tokens * (saved * model.layers * in_flight + working)
