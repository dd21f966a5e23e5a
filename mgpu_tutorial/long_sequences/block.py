"""Packed documents read by several ranks, and the same documents read one by one."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils import parameters_to_vector

from mgpu_tutorial.long_sequences.documents import packed
from mgpu_tutorial.long_sequences.ring import RingAttention, zigzag
from mgpu_tutorial.tensor_parallel.block import Block


class Reader(nn.Module):
    """A transformer block between the embeddings of tokens and positions, and a head."""

    def __init__(self, attention: Callable) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.positions = nn.Embedding(17, 32), nn.Embedding(32, 32)
        self.block, self.head = Block(width=32, heads=8), nn.Linear(32, 17)
        self.block.attention.attend = attention

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return self.head(self.block(self.tokens(tokens) + self.positions(positions)))


def one_by_one(rank: int, world_size: int, lengths: Sequence[int]) -> Tensor:
    """The mean of some documents' mean losses, and then its gradients."""
    torch.set_default_dtype(torch.float64)
    model, losses = Reader(partial(scaled_dot_product_attention, is_causal=True)), []
    for document in torch.randint(17, (1, sum(lengths))).split(lengths, 1):
        logits = model(document[:, :-1], torch.arange(document.shape[1] - 1))
        losses.append(cross_entropy(logits.mT, document[:, 1:]))
    loss = torch.stack(losses).mean()
    loss.backward()
    return parameters_to_vector([loss.detach(), *(p.grad for p in model.parameters())])


def together(
    rank: int,
    world_size: int,
    lengths: Sequence[int],
    pack: Callable = packed,
    deal_positions: Callable = zigzag,
    deal_labels: Callable = zigzag,
) -> Tensor:
    """The same of the same documents, in one sequence that the ranks share."""
    torch.set_default_dtype(torch.float64)
    hides, positions, weights = pack(lengths)
    model = Reader(lambda q, k, v: RingAttention.apply(q, k, v, zigzag, None, hides))
    deals = zigzag, deal_positions, deal_labels
    mine, places, after = (deal(sum(lengths), rank, world_size) for deal in deals)
    tokens = torch.randint(17, (1, sum(lengths)))
    following = tokens.roll(-1)
    logits = model(tokens[:, mine], positions[places])
    losses = cross_entropy(logits.mT, following[:, after], reduction="none")
    loss = (losses * weights[after]).sum()
    loss.backward()
    found = parameters_to_vector([loss.detach(), *(p.grad for p in model.parameters())])
    dist.all_reduce(found)
    return found
