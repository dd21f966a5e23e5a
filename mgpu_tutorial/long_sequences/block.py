"""A transformer block whose sequence is shared: each rank computes the loss of its tokens."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.long_sequences.dealing import zigzag
from mgpu_tutorial.long_sequences.ring import Deal, RingAttention

Attention = Callable[[Tensor, Tensor, Tensor, Deal], Tensor]


def rotate(x: Tensor, places: Tensor) -> Tensor:
    """RoPE: turn pairs of numbers by angles that grow with the token's position."""
    half = x.shape[-1] // 2
    angles = places[:, None] * 100.0 ** -(torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    turned = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
    return torch.cat(turned, -1)


class Block(nn.Module):
    """Embedding, attention with 8 heads of queries and 4 of keys, an MLP, and a head."""

    def __init__(self, vocabulary: int = 17, width: int = 32) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.first, self.second = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(
        self, tokens: Tensor, places: Tensor, attention: Attention, deal: Deal
    ) -> Tensor:
        x = self.token(tokens)
        normed = self.first(x)
        q = self.q(normed).unflatten(-1, (8, -1)).transpose(1, 2)
        k, v = self.kv(normed).unflatten(-1, (2, 4, -1)).permute(2, 0, 3, 1, 4)
        out = attention(rotate(q, places), rotate(k, places), v, deal)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return self.head(x + self.mlp(self.second(x)))


def text(length: int = 32) -> tuple[Tensor, Tensor]:
    """Tokens and the tokens that follow; of a prompt of 10 tokens the loss learns nothing."""
    torch.manual_seed(1)
    tokens = torch.randint(17, (1, length + 1))
    following = tokens[:, 1:].clone()
    following[:, :10] = -100  # which cross_entropy leaves out
    return tokens[:, :-1], following


def count_all(valid: Tensor) -> Tensor:
    """The tokens with a loss on all ranks, from this rank's."""
    dist.all_reduce(valid)
    return valid


def part_of_mean(logits: Tensor, following: Tensor) -> Tensor:
    """What this rank's tokens add to the mean loss over the tokens of all ranks."""
    losses = cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
    return losses / count_all((following != -100).sum())


def loss_and_gradients(
    rank: int,
    world_size: int,
    attention: Attention = RingAttention.apply,
    deal: Deal = zigzag,
    deal_places: Deal = zigzag,
    deal_following: Deal = zigzag,
) -> tuple[float, dict[str, Tensor]]:
    """The loss of one sequence on all ranks, and its gradients; returned on each rank."""
    torch.manual_seed(0)
    model, (tokens, following) = Block().double(), text()
    length = tokens.shape[1]
    tokens = tokens[:, deal(length, rank, world_size)]
    following = following[:, deal_following(length, rank, world_size)]
    places = deal_places(length, rank, world_size)
    loss = part_of_mean(model(tokens, places, attention, deal), following)
    loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}
