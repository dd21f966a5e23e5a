"""A block of a transformer, its layers on several ranks, and what must be the same on all."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss, scaled_dot_product_attention

from mgpu_tutorial.shared.models import MLP
from mgpu_tutorial.shared.parameters import fingerprint
from mgpu_tutorial.tensor_parallel.layers import (
    ColumnParallelLinear,
    Group,
    RowParallelLinear,
    Shard,
)


class Attention(nn.Module):
    """Each token looks at itself and those before it; (batch, sequence, width) both ways."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.per_head = width // heads
        self.qkv = nn.Linear(width, 3 * width)  # head by head: query, key, value
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.per_head))
        # each (batch, heads, sequence, per head)
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(-2))
        mixed = self.attend(q, k, v)
        return self.out(mixed.transpose(1, 2).flatten(-2))

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    """Attention, then a perceptron; each takes the normed input and adds its output to x."""

    def __init__(self, width: int = 48, heads: int = 12) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def parallelize(block: Block, group: Group = None) -> Block:
    """Attention by heads, the MLP by features; ValueError where the heads don't divide."""
    attention, mlp, ranks = block.attention, block.mlp, dist.get_world_size(group)
    heads = attention.out.in_features // attention.per_head
    if heads % ranks:
        raise ValueError(f"{ranks} ranks cannot share {heads} heads evenly")
    attention.qkv = ColumnParallelLinear(attention.qkv, group)
    attention.out = RowParallelLinear(attention.out, group)
    mlp.up = ColumnParallelLinear(mlp.up, group)
    mlp.down = RowParallelLinear(mlp.down, group)
    return block


# Copies: what every rank has whole must have the same bits on all of them


def copies(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that every rank has whole, by name."""
    return {n: p for n, p in model.named_parameters() if not isinstance(p, Shard)}


def copies_that_differ(model: nn.Module, group: Group = None) -> list[str]:
    """The copies whose bits differ between ranks; all ranks of the group call it."""
    mine = {n: fingerprint(nn.ParameterList([p])) for n, p in copies(model).items()}
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, mine, group=group)
    return [name for name in mine if len({other[name] for other in everyone}) > 1]


def whole_of(tensor: torch.Tensor, parameter: nn.Parameter) -> torch.Tensor:
    """Put together what all ranks have of `parameter`: its values, or its gradient."""
    if not isinstance(parameter, Shard):
        return tensor.detach()
    every = [torch.empty_like(tensor) for _ in range(dist.get_world_size(parameter.group))]
    dist.all_gather(every, tensor.detach().contiguous(), group=parameter.group)
    return torch.cat(every, parameter.cut)


# A step


def new_block() -> Block:
    """A block of width 48 with twelve heads, in float64; the same on every rank."""
    torch.manual_seed(0)
    return Block(width=48, heads=12).double()


def gradients_of(block: Block, step: int = 0) -> torch.Tensor:
    """Forward and backward of a batch that all ranks have; returns the loss."""
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randn(2, 4, 12, 48, generator=generator, dtype=torch.float64)
    loss = mse_loss(block(x), target)
    loss.backward()
    return loss.detach()
