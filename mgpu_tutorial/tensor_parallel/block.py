"""A language model in pieces: attention by heads, the MLP by features, the vocabulary."""

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.shared.models import MLP, Attention, SmallTransformer
from mgpu_tutorial.tensor_parallel.copies import all_of
from mgpu_tutorial.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from mgpu_tutorial.tensor_parallel.operators import CopyToRanks, Group, Operator, SumOverRanks
from mgpu_tutorial.tensor_parallel.vocabulary import (
    VocabularyParallelEmbedding,
    VocabularyParallelHead,
)


def parallelize(
    model: SmallTransformer,
    group: Group = None,
    enter: Operator = CopyToRanks,
    leave: Operator = SumOverRanks,
    mask: bool = True,
) -> SmallTransformer:
    """Replace the layers of a model by pieces; it then returns this rank's logits.

    The pieces are cut from what the group's first rank has, which it sends to the others.
    What is no Piece afterwards (norms, positions, the MLP's second bias) is whole on every
    rank. Every rank must see the same batch: the first one is compared.

    Raises ValueError on every rank where the ranks' models differ, where the number of ranks
    does not divide the heads, the key-value heads or the features, and where it was done
    before.
    """
    require_same_model(model, group)
    require_even(model, dist.get_world_size(group))
    for value in [*model.parameters(), *model.buffers()]:
        dist.broadcast(value.detach(), group=group, group_src=0)
    tied = model.head.weight is model.token.weight
    model.token = VocabularyParallelEmbedding(model.token, group, leave)
    for block in model.blocks:
        cut_attention(block.attention, group, enter, leave)
        cut_mlp(block.mlp, group, enter, leave)
    shared = model.token.weight if tied else None
    model.head = VocabularyParallelHead(model.head, group, enter, shared, mask)
    FirstBatch(group).watch(model)
    return model


def cut_mlp(mlp: MLP, group: Group, enter: Operator, leave: Operator) -> None:
    """By columns, then by rows: the features between stay on the rank that computes them."""
    mlp.up = ColumnParallelLinear(mlp.up, group, enter)
    mlp.down = RowParallelLinear(mlp.down, group, leave)


def cut_attention(
    attention: Attention, group: Group, enter: Operator, leave: Operator
) -> None:
    """By heads: the columns of a head are side by side, and no head looks at another."""
    for name in ("query", "key", "value"):
        whole = getattr(attention, name)
        setattr(attention, name, ColumnParallelLinear(whole, group, enter=None))
    attention.out = RowParallelLinear(attention.out, group, leave)
    # the three have one input, so it enters once
    attention.register_forward_pre_hook(lambda _, x: (enter.apply(x[0], group),))


def require_even(model: SmallTransformer, ranks: int) -> None:
    """ValueError where heads or features cannot be shared out evenly."""
    for block in model.blocks:
        attention = block.attention
        if not isinstance(attention.query, nn.Linear):
            raise ValueError("this model is in pieces already: parallelize it once")
        heads = attention.query.out_features // attention.per_head
        kv_heads = attention.key.out_features // attention.per_head
        if heads % ranks:
            raise ValueError(f"{ranks} ranks cannot share {heads} heads evenly")
        if kv_heads % ranks:
            raise ValueError(
                f"{ranks} ranks cannot share {kv_heads} key-value heads evenly: take a "
                f"number of ranks that divides {kv_heads}"
            )


def require_same_model(model: nn.Module, group: Group) -> None:
    """ValueError, on every rank alike, where the ranks' parameters look different."""
    mine = [(name, list(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    everyone = all_of(mine, group)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise ValueError(
                f"rank {rank} of the group has other parameters than its rank 0: "
                "build the same model on every rank"
            )


class FirstBatch:
    """Compares the first batch of all ranks, which must be the same, and then nothing more.

    A sampler that gives each rank its own samples, as data parallel wants it, would let the
    ranks add up parts of different sequences.
    """

    def __init__(self, group: Group) -> None:
        self.group, self.compared = group, False

    def watch(self, model: nn.Module) -> None:
        """Be called before every forward of `model`."""
        model.register_forward_pre_hook(self.compare)

    def compare(self, _: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        """ValueError, on every rank alike, where a rank has another batch."""
        if self.compared:
            return
        batches = all_of(inputs[0].tolist(), self.group)
        for rank, other in enumerate(batches):
            if other != batches[0]:
                raise ValueError(
                    f"rank {rank} of the group has another batch than its rank 0: ranks "
                    "that share a model must read the same samples"
                )
        self.compared = True
