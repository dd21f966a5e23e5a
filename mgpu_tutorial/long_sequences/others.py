"""Other ways to share attention: all keys gathered, and tokens for heads."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mgpu_tutorial.long_sequences.ring import (
    Group,
    RingAttention,
    attend,
    is_later,
    places_of,
    spread,
)
from mgpu_tutorial.tensor_parallel_in_practice.sequence import GatherSequence


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, deal: Callable, group: Group = None
) -> Tensor:
    """Causal attention of this rank's queries; every rank holds all keys and values."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    places = places_of(q, deal, world_size)
    kv = torch.stack([k, v])
    every = GatherSequence.apply(kv.flatten(0, 2), group).unflatten(0, kv.shape[:3])
    return attend(q, *every, is_later(places[rank], torch.cat(places)))[0].to(q.dtype)


class Exchange(torch.autograd.Function):
    """Each rank cuts its tensor into a part per rank along `cut`, and joins what it gets."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cut: int, join: int, group: Group = None) -> Tensor:
        ctx.back = join, cut, group
        parts = torch.stack(tensor.chunk(dist.get_world_size(group), cut))
        arriving = torch.empty_like(parts)
        dist.all_to_all_single(arriving, parts, group=group)
        return torch.cat(arriving.unbind(), join)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return Exchange.apply(gradient, *ctx.back), None, None, None


def ulysses(
    q: Tensor, k: Tensor, v: Tensor, group: Group = None, hides: Callable | None = None
) -> Tensor:
    """Attention of neighbouring tokens: each rank has some heads of all tokens.

    Tokens are dealt by `contiguous`. Causal, unless `hides` says what is hidden.
    Not general: `prove` it on your model.
    """
    ranks, heads, kv_heads = dist.get_world_size(group), q.shape[1], k.shape[1]
    if heads % ranks or (kv_heads % ranks and ranks % kv_heads):
        raise ValueError(f"{heads} heads, {kv_heads} of keys: not for {ranks} ranks")
    k, v = (spread(x, max(ranks, kv_heads)) for x in (k, v))  # one for each rank at least
    q, k, v = (Exchange.apply(x, 1, 2, group) for x in (q, k, v))
    sees = None
    if hides is not None:  # all tokens are here, in order
        places = torch.arange(q.shape[2], device=q.device)
        sees = ~hides(places, places)
    how = {"attn_mask": sees, "is_causal": hides is None, "enable_gqa": True}
    out = scaled_dot_product_attention(q, k, v, **how)
    return Exchange.apply(out, 2, 1, group)


METHODS: Mapping[str, Callable] = {  # of queries, keys, values and a deal
    "ring": RingAttention.apply,
    "all-gather": gathered_attention,
    "ulysses": lambda q, k, v, deal: ulysses(q, k, v),
}


def sent_by_formula(method: str, ranks: int, d: int, group: int, tokens: int) -> float:
    """Numbers that a rank sends in forward for tokens of width `d`, by attention's method.

    `group` queries share a head of keys, of which there are as many as ranks or more.
    """
    unit = tokens * d / ranks
    if method == "ulysses":
        return (ranks - 1) / ranks * unit * (2 + 2 / group)
    return 2 * (ranks - 1) * unit / group
