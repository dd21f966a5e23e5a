"""Transformers by their shape, plans that share them out over ranks, and a GPU's bytes."""

import math
from numbers import Real
from typing import NamedTuple

from mgpu_tutorial.shared.guards import whole

RECOMPUTATIONS = ("none", "selective", "full")
WEIGHT, OPTIMIZER = 2, 12  # bytes per parameter: 16-bit weights; master weights and moments
LOGIT = 6  # bytes per logit: in 16 bits, and in 32 for the loss


class Model(NamedTuple):
    """A decoder of equal layers; widths are in numbers, `sequence` in tokens.

    `kv_heads` is 0 where keys and values have as many heads as queries, and `ffn`, the width
    inside the MLP, where it is four times `hidden`. A `gated` MLP has three
    matrices, as in Llama, and no dropout. With `tied` the head shares the embedding. Of its
    `experts` MLPs per layer a token uses `active`. Norms and routers don't count.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    vocabulary: int = 51_200
    kv_heads: int = 0
    ffn: int = 0
    gated: bool = False
    tied: bool = True
    experts: int = 1
    active: int = 1

    @property
    def kv_width(self) -> float:
        """The numbers of a token's keys, and of its values."""
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(
                f"{self.heads} heads cannot share {self.kv_heads} of keys and values: give a "
                "number that divides the heads"
            )
        return self.hidden * (self.kv_heads or self.heads) / self.heads

    @property
    def ffn_width(self) -> int:
        """The numbers of a token between the products of an MLP."""
        return self.ffn or 4 * self.hidden

    @property
    def mlp_parameters(self) -> float:
        """Of one MLP, or of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.ffn_width

    @property
    def layer_parameters(self) -> float:
        """Of one layer, with all its experts."""
        attention = 2 * self.hidden**2 + 2 * self.hidden * self.kv_width
        return attention + self.experts * self.mlp_parameters

    @property
    def expert_parameters(self) -> float:
        """Of all experts of all layers; none where each layer has one MLP."""
        return self.layers * self.experts * self.mlp_parameters * (self.experts > 1)

    @property
    def embedding_parameters(self) -> float:
        """Of the embedding, and of the head if that is another matrix."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def parameters(self) -> float:
        """Of the whole model."""
        return self.layers * self.layer_parameters + self.embedding_parameters

    # Operations of one token, forward: two per parameter that it uses

    def layer_flops(self) -> float:
        """Of the products with one layer's weights; a token skips the idle experts."""
        if self.active > self.experts:
            raise ValueError(f"a token cannot use {self.active} of {self.experts} experts")
        idle = self.experts - self.active
        return 2 * (self.layer_parameters - idle * self.mlp_parameters)

    def attention_flops(self, causal: bool = False) -> float:
        """Of one layer; half of it if the kernel knows that no token looks ahead."""
        return 4 * self.sequence * self.hidden * (0.5 if causal else 1)

    def head_flops(self) -> float:
        """Of the product that gives the token's logits."""
        return 2 * self.vocabulary * self.hidden

    def flops_per_token(self, recompute: bool = False, causal: bool = False) -> float:
        """Of one token in forward and backward, which is twice the forward.

        With `recompute` as in equation (3) of https://arxiv.org/abs/2104.04473.
        """
        layer = self.layer_flops() + self.attention_flops(causal)
        return (4 if recompute else 3) * self.layers * layer + 3 * self.head_flops()


def model_of(parameters: float, sequence: int = 2048, vocabulary: int = 51_200) -> Model:
    """A model of about so many parameters, from 50 million, in the proportions of GPT-3.

    Raises ValueError for fewer, and for what is no number, such as "7B".
    """
    if not (isinstance(parameters, Real) and 5e7 <= parameters < math.inf):
        raise ValueError(
            f"parameters must be a number of 50 million or more, such as 7e9, got "
            f"{parameters!r}"
        )
    whole("sequence", sequence)
    whole("vocabulary", vocabulary)
    hidden = max(512, 128 * round((parameters * 128 / 12) ** (1 / 3) / 128))
    if hidden > 4096:
        hidden = 1024 * round(hidden / 1024)  # so that heads can be shared out by eight
    layers = max(2, round((parameters - vocabulary * hidden) / (12 * hidden**2)))
    if layers > 16:
        layers = 8 * round(layers / 8)  # so that stages can be equal
    model = Model(layers, hidden, hidden // 128, sequence, vocabulary)
    if model.parameters > 1.5 * parameters:
        raise ValueError(
            f"a vocabulary of {vocabulary} makes {model.parameters:.3g} parameters of "
            f"{parameters:g}: give a smaller vocabulary, or more parameters"
        )
    return model


class Plan(NamedTuple):
    """What each rank holds and computes; the world is tp · cp · pp · dp ranks.

    `tp` ranks share each matrix, `cp` each sequence, `pp` the layers, and `dp` the batch.
    `ep` of the `dp` ranks share out the experts of a layer, and send each other tokens.
    `micro_batch` is in sequences; a rank of the pipeline has `interleaving` stages. `zero`
    is the stage of ZeRO over the ranks of `dp` and `cp`. `recompute` is "none", "selective"
    (the scores of the attention; with `flash`, which keeps none, norms and the activation
    function) or "full" (each layer).

    `sequence_parallel` shares what lies between the matrix products over the `tp` ranks too.
    `flash` never writes the attention's scores into memory. `overlap` sends gradients during
    the last micro-batch's backward, and ZeRO 3 always sends under the compute. Gradients
    that are added up and sent have `gradient_bytes` per number.
    With `share_node` the GPUs of a node take parameters from each other, so that each
    crosses the network once a node; ZeRO 3 of 2021 behaves as if they did not.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batch: int = 1
    interleaving: int = 1
    zero: int = 0
    recompute: str = "none"
    cp: int = 1
    sequence_parallel: bool = True
    flash: bool = True
    overlap: bool = True
    gradient_bytes: int = 4
    share_node: bool = True
    ep: int = 1

    @property
    def ranks(self) -> int:
        """The GPUs that the plan takes; those of `ep` are among them."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO cuts: those that hold the same part of the model."""
        return self.dp * self.cp

    def micro_batches(self, batch: int) -> float:
        """How many micro-batches each pipeline takes for a batch of so many sequences."""
        return batch / (self.dp * self.micro_batch)

    def __str__(self) -> str:
        sizes = [(name, getattr(self, name)) for name in ("tp", "cp", "pp", "dp", "ep")]
        parts = [f"{name.upper()} {size}" for name, size in sizes if size > 1]
        return " · ".join(parts) or "one GPU"


SIZES = ("tp", "pp", "dp", "cp", "ep", "micro_batch", "interleaving", "gradient_bytes")
WIDTHS = ("layers", "hidden", "heads", "sequence", "vocabulary", "experts", "active")


def require_truths(owner: NamedTuple, *names: str) -> None:
    """ValueError, with the name of the field, for what is neither True nor False."""
    for name in names:
        if not isinstance(value := getattr(owner, name), bool):
            raise ValueError(f"{name} must be True or False, got {value!r}")


def check_model(model: Model) -> None:
    """Raises ValueError for a shape that no transformer has."""
    if not isinstance(model, Model):
        raise ValueError(
            f"model must be a Model, such as model_of(7e9) or Model(layers, hidden, heads), "
            f"got {model!r:.60}"
        )
    for name in WIDTHS:
        whole(name, getattr(model, name))
    for name in ("kv_heads", "ffn"):  # 0 stands for the usual
        whole(name, getattr(model, name), least=0)
    require_truths(model, "gated", "tied")
    if model.hidden % model.heads or model.heads % (model.kv_heads or model.heads):
        shape = f"width {model.hidden}, {model.heads} heads and {model.kv_heads} of keys"
        raise ValueError(f"{shape}: each number must divide the one before it")
    if model.active > model.experts:
        raise ValueError(f"a token cannot use {model.active} of {model.experts} experts")


def check_plan(model: Model, plan: Plan, batch: int) -> None:
    """Raises ValueError where the plan cannot be run with this model and batch.

    Heads, tokens (by zig-zag), sequences and layers must divide into equal shares; stages may
    count embedding and head as layers. An interleaved pipeline takes its micro-batches in
    rounds of `pp`, and may give embedding and head a stage of their own.
    """
    check_model(model)
    if not isinstance(plan, Plan):
        raise ValueError(f"plan must be a Plan, such as Plan(tp=8, dp=2), got {plan!r:.60}")
    whole("batch", batch)
    for name in SIZES:
        whole(name, getattr(plan, name))
    if plan.recompute not in RECOMPUTATIONS:
        known = ", ".join(RECOMPUTATIONS)
        raise ValueError(f"recompute must be one of {known}, got {plan.recompute!r}")
    if isinstance(plan.zero, bool) or plan.zero not in (0, 1, 2, 3):
        raise ValueError(f"zero must be a stage from 0 to 3, got {plan.zero!r}")
    require_truths(plan, "sequence_parallel", "flash", "overlap", "share_node")
    least, stages = plan.dp * plan.micro_batch, plan.pp * plan.interleaving
    if batch < least:
        raise ValueError(f"a batch of {batch} is too small: dp · micro_batch is {least}")
    if batch % least:
        rest = f"dp · micro_batch is {least}, and {batch % least} sequences would be left"
        raise ValueError(f"a batch of {batch} does not divide into micro-batches: {rest}")
    if model.heads % plan.tp:
        raise ValueError(f"tp = {plan.tp} does not divide {model.heads} heads")
    if plan.pp == 1 and plan.interleaving > 1:
        raise ValueError(f"interleaving = {plan.interleaving} needs a pipeline, and pp is 1")
    ends = 2 if plan.interleaving > 1 else 0  # embedding and head may have their own
    if stages > model.layers + ends:
        raise ValueError(f"{model.layers} layers do not make {stages} stages")
    if model.layers % stages and (model.layers + 2) % stages:
        both = "with embedding and head or without"
        raise ValueError(f"{model.layers} layers make no {stages} equal stages, {both}")
    if plan.interleaving > 1 and batch % (least * plan.pp):
        rounds = f"interleaving takes micro-batches in rounds of pp = {plan.pp}"
        raise ValueError(f"{rounds}, and a batch of {batch} makes {batch // least}")
    if plan.dp % plan.ep or model.experts % plan.ep:
        raise ValueError(f"ep = {plan.ep} does not divide dp and {model.experts} experts")
    if plan.cp > 1 and model.sequence % (2 * plan.cp):
        parts = f"{2 * plan.cp} equal parts, two for each rank of cp = {plan.cp}"
        raise ValueError(f"{model.sequence} tokens do not divide into {parts}")


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
        """All of it, in bytes."""
        return sum(self)


def saved_bytes(model: Model, plan: Plan) -> tuple[float, float]:
    """What a rank saves of a token in one layer, and what selective recomputation repeats.

    As in https://arxiv.org/abs/2205.05198: in a plain GPT 10 h bytes lie between the matrix
    products, and only sequence parallelism shares them; 24 h are the inputs of the products,
    and 5 a s the scores of the attention. Selective recomputation repeats the scores. Flash
    attention saves none; then it repeats what is as cheap: the outputs of the norms and of
    the activation function.
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


def memory_of(model: Model, plan: Plan, batch: int) -> Memory:
    """The bytes of a GPU of the first stage, which holds the most micro-batches.

    Raises ValueError where the plan cannot be run.
    """
    check_plan(model, plan, batch)
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
    return Memory(*state, tokens * activations(model, plan, batch), gathered, logits)


def activations(model: Model, plan: Plan, batch: int) -> float:
    """Bytes per token that the first stage saves for backward, of all micro-batches."""
    saved, again = saved_bytes(model, plan)
    working = 0.0
    if plan.recompute == "selective":
        saved, working = saved - again, again
    elif plan.recompute == "full":  # the input of each layer, and one layer while it is done
        shared = plan.tp if plan.sequence_parallel else 1
        saved, working = 2 * model.hidden / shared, saved
    in_flight = min(plan.micro_batches(batch), plan.pp) / plan.pp
    if plan.interleaving > 1:
        in_flight *= 1 + (plan.pp - 1) / (plan.pp * plan.interleaving)
    return saved * model.layers * in_flight + working
