"""A language model in pieces: attention by heads, the MLP by features, the vocabulary.

With sequence parallel, what lies between the pieces works on slices of the sequence: norms
and residual sums treat every token by itself, so each rank can do its share of the tokens.
The ranks gather the sequence where the pieces begin and scatter it where they end.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.shared.models import MLP, Attention, SmallTransformer
from mgpu_tutorial.shared.parameters import fingerprint, require_same
from mgpu_tutorial.tensor_parallel.layers import (
    ColumnParallelLinear,
    Piece,
    RowParallelLinear,
)
from mgpu_tutorial.tensor_parallel.operators import (
    CopyToRanks,
    GatherSequence,
    Group,
    Operator,
    ScatterSequence,
    SumOverRanks,
)
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
    mine = [(name, list(p.shape), str(p.dtype)) for name, p in model.named_parameters()]
    require_same(mine, "parameters", "build the same model on every rank", group)
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
    compare_first_batch(model, group)
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


def compare_first_batch(model: nn.Module, group: Group) -> None:
    """Before its first forward `model` compares the batches of all ranks of the group.

    They must be the same. A sampler that gives each rank its own samples, as data parallel
    wants it, would let the ranks add up parts of different sequences. Raises ValueError on
    every rank alike.
    """

    def compare(_: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        remedy = "ranks that share a model must read the same samples"
        require_same(inputs[0].tolist(), "tokens in its batch", remedy, group)
        hook.remove()

    hook = model.register_forward_pre_hook(compare)


# Sequence parallel


def parallelize_with_sequence(
    model: SmallTransformer, group: Group = None, mask: bool = True
) -> SmallTransformer:
    """As `parallelize`, and between the pieces every rank has a slice of the sequence.

    Each backward must be followed by `sum_replicated_gradients`. Raises ValueError on every
    rank as `parallelize` does, and in forward for a sequence that cannot be cut evenly.
    """
    parallelize(model, group, GatherSequence, ScatterSequence, mask)
    model.position = PositionsOfSlice(model.position, group)
    return model


class PositionsOfSlice(nn.Module):
    """The embeddings of the positions of this rank's slice; all ranks have the same table."""

    def __init__(self, whole: nn.Embedding, group: Group = None) -> None:
        super().__init__()
        self.weight, self.group = whole.weight, group

    def forward(self, places: torch.Tensor) -> torch.Tensor:
        ranks, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        return nn.functional.embedding(places.chunk(ranks)[rank], self.weight)


def sum_replicated_gradients(model: nn.Module, group: Group = None) -> None:
    """Add up the gradients of what every rank has whole: each saw its own tokens only."""
    gradients = [p.grad for p in replicated(model).values() if p.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    sums = flat.split([gradient.numel() for gradient in gradients])
    for gradient, total in zip(gradients, sums, strict=True):
        gradient.copy_(total.view_as(gradient))


# Copies: replicated parameters must have the same bits on all ranks, and dropout on them


def replicated(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that every rank has whole, by name."""
    return {n: p for n, p in model.named_parameters() if not isinstance(p, Piece)}


def fingerprints(model: nn.Module) -> dict[str, str]:
    """The bits of each replicated parameter, as eight digits by name."""
    return {n: fingerprint(nn.ParameterList([p])) for n, p in replicated(model).items()}


def copies_that_differ(model: nn.Module, group: Group = None) -> list[str]:
    """The replicated parameters whose bits differ between ranks; all ranks call it."""
    mine = fingerprints(model)
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return [name for name in mine if len({other[name] for other in everyone}) > 1]


@contextmanager
def own_draws(group: Group = None) -> Iterator[None]:
    """Inside, every rank draws random numbers of its own; afterwards all draw the same.

    All ranks must have the same seed before, and enter.
    """
    seed = int(torch.randint(2**31, ()))  # a common draw, so a new one for each entry
    with torch.random.fork_rng():
        torch.manual_seed(seed + dist.get_rank(group))
        yield
