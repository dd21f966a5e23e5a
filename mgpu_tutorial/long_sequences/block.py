"""A transformer block whose sequence is shared: each rank computes the loss of its tokens."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector

from mgpu_tutorial.long_sequences.ring import RingAttention, zigzag
from mgpu_tutorial.tensor_parallel.block import Block


def rotate(x: Tensor, places: Tensor) -> Tensor:
    """RoPE: turn pairs of numbers by angles that grow with the token's position."""
    half = x.shape[-1] // 2
    angles = places[:, None] * 100.0 ** -(torch.arange(half) / half)
    a, b = x.chunk(2, -1)
    turned = a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()
    return torch.cat(turned, -1)


def new_model(places: Tensor, attention: Callable, deal: Callable) -> nn.Sequential:
    """An embedding, the block of tensor parallel with RoPE and this attention, and a head."""
    torch.manual_seed(0)
    block = Block(width=32, heads=8)
    block.attention.attend = lambda q, k, v: attention(
        rotate(q, places), rotate(k, places), v, deal
    )
    return nn.Sequential(nn.Embedding(17, 32), block, nn.Linear(32, 17)).double()


def text() -> tuple[Tensor, Tensor]:
    """32 tokens and those that follow; of a prompt of 10 tokens the loss learns nothing."""
    torch.manual_seed(1)
    tokens = torch.randint(17, (1, 33))
    following = tokens[:, 1:].clone()
    following[:, :10] = -100  # which cross_entropy leaves out
    return tokens[:, :-1], following


def part_of_mean(logits: Tensor, following: Tensor) -> Tensor:
    """What this rank's tokens add to the mean loss over the tokens of all ranks."""
    losses = cross_entropy(logits.flatten(0, 1), following.flatten(), reduction="sum")
    valid = (following != -100).sum()
    dist.all_reduce(valid)
    return losses / valid


def loss_and_gradients(
    rank: int,
    world_size: int,
    attention: Callable = RingAttention.apply,
    deal: Callable = zigzag,
    deal_places: Callable = zigzag,
    deal_following: Callable = zigzag,
) -> tuple[float, Tensor]:
    """The loss of one sequence on all ranks, and all its gradients; the same on each rank."""
    tokens, following = text()
    who = tokens.shape[1], rank, world_size
    model = new_model(deal_places(*who), attention, deal)
    loss = part_of_mean(model(tokens[:, deal(*who)]), following[:, deal_following(*who)])
    loss.backward()
    found = parameters_to_vector([loss.detach(), *(p.grad for p in model.parameters())])
    dist.all_reduce(found)
    return found[0].item(), found[1:]
