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


def padded(whole: nn.Module, group: Group = None) -> nn.Module:
    """An embedding or a head with rows of zeros below, so that ranks can share it evenly."""
    missing = -len(whole.weight) % dist.get_world_size(group)
    for name, parameter in list(whole.named_parameters()):
        below = [0, 0] * (parameter.dim() - 1) + [0, missing]
        longer = pad(parameter.detach(), below)
        setattr(whole, name, nn.Parameter(longer, parameter.requires_grad))
    return whole


class VocabularyParallelEmbedding(nn.Module):
    """Every rank has some tokens' rows, and zeros for others; a tie to the head ends here."""

    def __init__(self, whole: nn.Embedding, group: Group = None) -> None:
        super().__init__()
        self.g = SumOverRanks
        self.group = group
        self.vocabulary, self.padding = whole.num_embeddings, whole.padding_idx
        self.weight = shard(padded(whole, group).weight, 0, group)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        unknown = tokens[(tokens < 0) | (tokens >= self.vocabulary)]
        if len(unknown):
            raise IndexError(f"token {unknown[0]} of a vocabulary of {self.vocabulary}")
        local = tokens - dist.get_rank(self.group) * len(self.weight)
        here = (local >= 0) & (local < len(self.weight))
        rows = embedding(local.where(here, 0), self.weight)
        if self.padding is not None:  # its row gets no gradient
            rows = rows.detach().where((tokens == self.padding).unsqueeze(-1), rows)
        return self.g.apply(rows.where(here.unsqueeze(-1), 0), self.group)


class VocabularyParallelHead(ColumnParallelLinear):
    """Every rank computes the logits of some tokens; those of the padding don't count."""

    def __init__(self, whole: nn.Linear, group: Group = None) -> None:
        super().__init__(padded(whole, group), group)
        first = dist.get_rank(group) * len(self.weight)
        self.real = max(whole.out_features - first, 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x)
        logits[..., self.real :] = float("-inf")
        return logits


PLAN = {"token": VocabularyParallelEmbedding, "head": VocabularyParallelHead} | block.PLAN


def parallel_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, group: Group = None
) -> torch.Tensor:
    """The mean loss of all tokens, on every rank; in float32 at least.

    `logits` (…, vocabulary / ranks) are this rank's, `targets` (…) the same on all ranks.
    Logits of the whole vocabulary, as a plain head gives, would be taken for a part of it.
    A target of -100 does not count, as in PyTorch's `cross_entropy`.
    """
    size = logits.shape[-1] * dist.get_world_size(group)
    unknown = targets[(targets < 0) & (targets != -100) | (targets >= size)]
    if len(unknown):
        raise IndexError(f"target {unknown[0]} of a vocabulary of {size}")
    if logits.element_size() < 4:
        logits = logits.float()
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
    return (total.log() - right)[targets != -100].mean()


def new_model(
    dtype: torch.dtype = torch.float64, vocabulary: int = 61, depth: int = 2
) -> SmallTransformer:
    """A language model with blocks of tensor parallel; the same on every rank."""
    torch.manual_seed(0)
    model = SmallTransformer(vocabulary, width=48, depth=0, tied=False)
    model.blocks.extend(block.Block() for _ in range(depth))
    return model.to(dtype)


def new_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Four sequences of twelve tokens and those that follow, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(61, (4, 13), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def gradients_of(model: SmallTransformer, group: Group = None) -> torch.Tensor:
    """Forward and backward of a batch that all ranks have; returns the loss."""
    tokens, targets = new_batch()
    loss = parallel_cross_entropy(model(tokens), targets, group)
    loss.backward()
    return loss.detach()
