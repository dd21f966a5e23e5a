"""Plans: how a model and its batch are shared out over the ranks."""

from typing import NamedTuple

from mgpu_tutorial.shared.cost_model.models import Model

RECOMPUTATIONS = ("none", "selective", "full")


class Plan(NamedTuple):
    """What each rank holds and computes; the world is tp · cp · pp · dp ranks.

    `tp` ranks share each matrix, `cp` each sequence, `pp` the layers, and `dp` the batch.
    `ep` of the `dp` ranks share out the experts of a layer, and send each other tokens.
    `micro_batch` is in sequences; a rank of the pipeline has `interleaving` stages. `zero`
    is the stage of ZeRO over the ranks of `dp` and `cp`. `recompute` is "none", "selective"
    (the scores of the attention; with `flash`, which keeps none, norms and the activation
    function) or "full" (each layer).

    `sequence_parallel` shares what lies between the matrix products over the `tp` ranks as
    well. `flash` never writes the attention's scores into memory. `overlap` sends gradients
    during the backward of the last micro-batch, and ZeRO 3 always sends under the compute.
    `gradient_bytes` are those of a number in the gradients that are added up and sent.
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
        """The size of the world."""
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


def check_plan(model: Model, plan: Plan, batch: int) -> None:
    """Raises ValueError where the plan cannot be run with this model and batch."""
    least, stages = plan.dp * plan.micro_batch, plan.pp * plan.interleaving
    if plan.recompute not in RECOMPUTATIONS:
        known = ", ".join(RECOMPUTATIONS)
        raise ValueError(f"recompute must be one of {known}, got {plan.recompute!r}")
    if batch < least:
        raise ValueError(
            f"a batch of {batch} sequences is too small: {plan.dp} replicas with "
            f"micro-batches of {plan.micro_batch} need at least {least}"
        )
    if model.heads % plan.tp:
        raise ValueError(f"tp = {plan.tp} does not divide {model.heads} heads")
    if plan.pp > 1 and model.layers + 2 < stages:  # embedding and head may have their own
        raise ValueError(f"{model.layers} layers do not make {stages} stages")
    if plan.dp % plan.ep or model.experts % plan.ep:
        raise ValueError(f"ep = {plan.ep} does not divide dp and {model.experts} experts")
