"""The vocabulary in pieces: embedding, head, and a loss that never has all the logits."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import embedding, linear

from mgpu_tutorial.tensor_parallel.layers import Piece, piece_of
from mgpu_tutorial.tensor_parallel.operators import CopyToRanks, Group, Operator, SumOverRanks


class VocabularyParallelEmbedding(nn.Module):
    """Every rank has the rows of some tokens and gives zeros for all others.

    `leave` adds up the ranks' parts, of which only one is not zero. Takes token numbers
    (batch, sequence), the same on all ranks; raises IndexError on all of them for a token
    that is not in the vocabulary.
    """

    def __init__(
        self, whole: nn.Embedding, group: Group = None, leave: Operator = SumOverRanks
    ) -> None:
        super().__init__()
        self.weight = piece_of(whole.weight, 0, group, padded=True)
        self.vocabulary = whole.num_embeddings
        self.group, self.leave = group, leave

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        require_known(tokens, self.vocabulary)
        first = dist.get_rank(self.group) * len(self.weight)
        local = tokens - first
        elsewhere = (local < 0) | (local >= len(self.weight))
        rows = embedding(local.masked_fill(elsewhere, 0), self.weight)
        part = rows.masked_fill(elsewhere.unsqueeze(-1), 0)
        return self.leave.apply(part, self.group)


class VocabularyParallelHead(nn.Module):
    """Every rank computes the logits of some tokens: (batch, sequence, vocabulary / ranks).

    Where the vocabulary does not divide, the last ranks' pieces end with rows of zeros. The
    logits of these are set to minus infinity, so that nobody counts them as tokens;
    `mask=False` leaves that out, which is a mistake. `weight` is the embedding's piece where
    the whole model ties the two.
    """

    def __init__(
        self,
        whole: nn.Linear,
        group: Group = None,
        enter: Operator = CopyToRanks,
        weight: Piece | None = None,
        mask: bool = True,
    ) -> None:
        super().__init__()
        own = piece_of(whole.weight, 0, group, padded=True)
        self.weight = own if weight is None else weight
        self.group, self.enter = group, enter
        first = dist.get_rank(group) * len(own)
        real = whole.out_features - first if mask else len(own)
        self.real = max(0, min(len(own), real))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = linear(self.enter.apply(x, self.group), self.weight)
        if self.real < len(self.weight):
            logits[..., self.real :] = float("-inf")
        return logits


class ParallelCrossEntropy(torch.autograd.Function):
    """The ranks send three numbers per token instead of its logits."""

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, group: Group
    ) -> torch.Tensor:
        first = dist.get_rank(group) * logits.shape[-1]
        local = targets - first
        elsewhere = (local < 0) | (local >= logits.shape[-1])
        index = local.masked_fill(elsewhere, 0).unsqueeze(-1)
        # the largest logit of all ranks, so that exp() cannot overflow
        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted = logits - largest.unsqueeze(-1)
        # the logit of the right token, from the one rank that has it
        right = shifted.gather(-1, index).squeeze(-1).masked_fill(elsewhere, 0)
        dist.all_reduce(right, group=group)
        # the sum over the whole vocabulary
        exponentials = shifted.exp_()
        total = exponentials.sum(-1)
        dist.all_reduce(total, group=group)
        softmax = exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(softmax, index, elsewhere)
        return total.log() - right

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        softmax, index, elsewhere = ctx.saved_tensors
        here = (~elsewhere).unsqueeze(-1).to(softmax.dtype)
        difference = softmax.scatter_add(-1, index, -here)  # minus 1 at the right token
        return difference * gradient.unsqueeze(-1), None, None


def parallel_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, vocabulary: int, group: Group = None
) -> torch.Tensor:
    """The mean loss of all tokens, the same on every rank.

    `logits` (…, vocabulary / ranks) are this rank's, `targets` (…) the same on all ranks.
    Computes in float32 at least. Raises IndexError, on every rank, for a target that is not
    in the vocabulary.
    """
    require_known(targets, vocabulary)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return ParallelCrossEntropy.apply(wide, targets, group).mean()


def require_known(tokens: torch.Tensor, vocabulary: int) -> None:
    """IndexError for a token outside the vocabulary, which would be no rank's."""
    if tokens.numel() and not (tokens.min() >= 0 and tokens.max() < vocabulary):
        low, high = int(tokens.min()), int(tokens.max())
        raise IndexError(
            f"tokens from {low} to {high}, but a vocabulary of {vocabulary}: no rank has them"
        )
