"""Two other ways to share the attention: gather all keys, or exchange tokens for heads."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mgpu_tutorial.long_sequences.blocks import attend, spread
from mgpu_tutorial.long_sequences.ring import Deal


class Gather(torch.autograd.Function):
    """All ranks' blocks, one after the other; backward adds up what all have for each."""

    @staticmethod
    def forward(ctx: Any, block: Tensor) -> Tensor:
        every = block.new_empty(dist.get_world_size() * len(block), *block.shape[1:])
        dist.all_gather_single(every, block)
        return every

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        length = len(gradient) // dist.get_world_size()
        block = gradient.new_empty(length, *gradient.shape[1:])
        dist.reduce_scatter_single(block, gradient.contiguous())
        return block


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, deal: Deal) -> Tensor:
    """Causal attention of this rank's queries; every rank holds all keys and values."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    length = q.shape[2] * world_size
    every = Gather.apply(torch.stack([k, v])).unflatten(0, (world_size, 2))
    k, v = torch.cat(every.unbind(), dim=-2)
    theirs = torch.cat([deal(length, other, world_size) for other in range(world_size)])
    return attend(q, k, v, theirs > deal(length, rank, world_size)[:, None])[0]


class Exchange(torch.autograd.Function):
    """Each rank cuts its tensor into a part per rank along `cut`, and joins what it gets."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cut: int, join: int) -> Tensor:
        ctx.back = join, cut
        parts = torch.stack(tensor.chunk(dist.get_world_size(), cut))
        arriving = torch.empty_like(parts)
        dist.all_to_all_single(arriving, parts)
        return torch.cat(arriving.unbind(), join)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return Exchange.apply(gradient, *ctx.back), None, None


def ulysses(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of neighbouring tokens: each rank has some heads of all tokens."""
    world_size, heads, kv_heads = dist.get_world_size(), q.shape[1], k.shape[1]
    if heads % world_size or (kv_heads % world_size and world_size % kv_heads):
        text = f"{heads} heads and {kv_heads} of keys do not divide among {world_size} ranks"
        raise ValueError(f"{text}: take fewer ranks, or a ring, which cuts no head")
    k, v = (spread(x, max(world_size, kv_heads)) for x in (k, v))
    q, k, v = (Exchange.apply(x, 1, 2) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return Exchange.apply(out, 2, 1)
