"""A language model whose vocabulary is cut: embedding, head, and the loss."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import embedding, pad

from mgpu_tutorial.shared.models import SmallTransformer
from mgpu_tutorial.tensor_parallel import block
from mgpu_tutorial.tensor_parallel.layers import (
    ColumnParallelLinear,
    Group,
    SumOverRanks,
    shard,
)


def parallelize(model: SmallTransformer, group: Group = None) -> SmallTransformer:
    """Cut embedding, blocks and head; the model then returns this rank's logits."""
    model.token = VocabularyParallelEmbedding(model.token, group)
    for one in model.blocks:
        block.parallelize(one, group)
    model.head = VocabularyParallelHead(model.head, group)
    return model


def padded(whole: nn.Module, group: Group = None) -> nn.Module:
    """An embedding or a head with rows of zeros below, so that ranks can share it evenly."""
    missing = -len(whole.weight) % dist.get_world_size(group)
    whole.weight = nn.Parameter(pad(whole.weight.detach(), (0, 0, 0, missing)))
    return whole


class VocabularyParallelEmbedding(nn.Module):
    """Every rank has the rows of some tokens and gives zeros for all others."""

    g = SumOverRanks

    def __init__(self, whole: nn.Embedding, group: Group = None) -> None:
        super().__init__()
        self.weight = shard(padded(whole, group).weight, 0, group)
        self.vocabulary, self.group = whole.num_embeddings, group

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if tokens.min() < 0 or tokens.max() >= self.vocabulary:
            raise IndexError(f"a token is not in a vocabulary of {self.vocabulary}")
        local = tokens - dist.get_rank(self.group) * len(self.weight)
        here = (local >= 0) & (local < len(self.weight))
        rows = embedding(local.where(here, 0), self.weight)
        return self.g.apply(rows * here.unsqueeze(-1), self.group)


class VocabularyParallelHead(ColumnParallelLinear):
    """Every rank computes the logits of some tokens: (batch, sequence, vocabulary / ranks).

    The logits of the padding rows are minus infinity, so that they don't count.
    """

    def __init__(self, whole: nn.Linear, group: Group = None) -> None:
        super().__init__(padded(whole, group), group)
        first = dist.get_rank(group) * len(self.weight)
        self.real = min(max(whole.out_features - first, 0), len(self.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x)
        logits[..., self.real :] = float("-inf")
        return logits


def parallel_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, group: Group = None
) -> torch.Tensor:
    """The mean loss of all tokens, on every rank; in float32 at least.

    `logits` (…, vocabulary / ranks) are this rank's, `targets` (…) the same on all ranks.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # the largest logit of all ranks, so that exp() cannot overflow
    largest = logits.detach().amax(-1)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    shifted = logits - largest.unsqueeze(-1)
    # the sum of the exponentials over the whole vocabulary
    total = SumOverRanks.apply(shifted.exp().sum(-1), group)
    # the logit of the right token, from the one rank that has it
    local = targets - dist.get_rank(group) * logits.shape[-1]
    here = (local >= 0) & (local < logits.shape[-1])
    index = local.where(here, 0).unsqueeze(-1)
    mine = shifted.gather(-1, index).squeeze(-1).where(here, 0)
    right = SumOverRanks.apply(mine, group)
    return (total.log() - right).mean()


# A step


def new_model(
    dtype: torch.dtype = torch.float64, vocabulary: int = 61, width: int = 48, depth: int = 2
) -> SmallTransformer:
    """A language model with blocks of 18; the same on every rank."""
    torch.manual_seed(0)
    model = SmallTransformer(vocabulary, width, depth=0, tied=False)
    model.blocks.extend(block.Block(width) for _ in range(depth))
    return model.to(dtype)


def new_batch(sequences: int = 4, length: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and the tokens that follow them, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(61, (sequences, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def gradients_of(model: SmallTransformer) -> torch.Tensor:
    """Forward and backward of a batch that all ranks have; returns the loss."""
    tokens, targets = new_batch()
    loss = parallel_cross_entropy(model(tokens), targets)
    loss.backward()
    return loss.detach()


def whole_gradients(model: SmallTransformer) -> dict[str, torch.Tensor]:
    """The gradients of the whole parameters by name, without rows that only fill up."""
    rows = {name: len(p) for name, p in new_model().named_parameters()}
    every = model.named_parameters()
    return {name: block.whole_of(p.grad, p)[: rows[name]] for name, p in every}
