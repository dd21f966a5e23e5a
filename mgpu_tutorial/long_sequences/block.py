"""A transformer block whose sequence is shared: each rank computes the loss of its tokens."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from mgpu_tutorial.long_sequences.ring import Group, RingAttention, zigzag
from mgpu_tutorial.tensor_parallel.block import Block


def rotate(x: Tensor, places: Tensor) -> Tensor:
    """RoPE: turn pairs of numbers by angles that grow with the token's position."""
    half = x.shape[-1] // 2
    angles = places[:, None] * 100.0 ** -(torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def part_of_mean(logits: Tensor, following: Tensor, group: Group = None) -> Tensor:
    """What this rank's tokens add to the mean loss over the tokens of all ranks."""
    losses = cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
    valid = (following != -100).sum()
    dist.all_reduce(valid, group=group)
    return losses / valid


def loss_and_gradients(
    rank: int,
    world_size: int,
    attention: Callable = RingAttention.apply,
    deal_places: Callable = zigzag,
    deal_following: Callable = zigzag,
    mean: Callable = part_of_mean,
) -> tuple[float, Tensor]:
    """The loss of 32 tokens on all ranks, and all its gradients; the same on each rank."""
    deals = zigzag, deal_places, deal_following
    mine, places, after = (deal(32, rank, world_size) for deal in deals)
    torch.manual_seed(0)
    block = Block(width=32, heads=8)
    block.attention.attend = lambda q, k, v: attention(
        rotate(q, places), rotate(k, places), v, zigzag
    )
    model = nn.Sequential(nn.Embedding(17, 32), block, nn.Linear(32, 17)).double()
    torch.manual_seed(1)
    tokens = torch.randint(17, (1, 33))
    following = tokens[:, 1:].clone()
    following[:, :10] = -100  # of a prompt the loss learns nothing
    loss = mean(model(tokens[:, mine]), following[:, after])
    loss.backward()
    found = parameters_to_vector([loss.detach(), *(p.grad for p in model.parameters())])
    dist.all_reduce(found)
    return found[0].item(), found[1:]
