"""The ring as it is used: FlashAttention for each block, no mask, hops beneath the blocks.

It is causal, and zig-zag has dealt the tokens: each rank has a chunk from the front, then its
mirror from the end. So of an arriving block either half the keys are seen, by all queries, or
all keys, by half the queries. Its FlashAttention is that of a CPU.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgpu_tutorial.lab import borrowed
from mgpu_tutorial.long_sequences.ring import (
    Group,
    begin_hop,
    float32_at_least,
    merge,
    spread,
)


def flash(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """What `attend` returns, by FlashAttention, which writes no scores to memory."""
    k, v = (spread(x, q.shape[1]) for x in (k, v))
    out, lse = borrowed.flash.thing(q, k, v, 0.0, causal)
    return float32_at_least(out), lse.unsqueeze(-1)


def around(block: Tensor, group: Group = None) -> Iterator[Tensor]:
    """The blocks of all ranks, one's own first. While one is used, the next one travels."""
    for _ in range(dist.get_world_size(group) - 1):
        arrive = begin_hop(block, 1, group)
        yield block
        block = arrive()
    yield block


def fast_ring(q: Tensor, k: Tensor, v: Tensor, group: Group = None) -> tuple[Tensor, Tensor]:
    """Causal attention of tokens dealt by zig-zag; its log-sum-exp."""
    rank, half = dist.get_rank(group), q.shape[2] // 2
    for step, kv in enumerate(around(torch.stack([k, v]), group)):
        if step == 0:  # one's own tokens, which are in order
            out, lse = flash(q, *kv, causal=True)
        elif step <= rank:  # an earlier rank's: all queries see its front chunk only
            out, lse = merge(out, lse, *flash(q, *kv[..., :half, :]))
        else:  # a later rank's: only the back chunk's queries see it, and see all of it
            back, back_lse = out[:, :, half:], lse[:, :, half:]
            merged = merge(back, back_lse, *flash(q[:, :, half:], *kv))
            out[:, :, half:], lse[:, :, half:] = merged
    return out, lse


class FastRing(torch.autograd.Function):
    """`fast_ring` that keeps no block: backward sends all around once more."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Group = None) -> Tensor:
        out, lse = fast_ring(q, k, v, group)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, half, every = dist.get_rank(ctx.group), q.shape[2] // 2, slice(None)
        dq, home = torch.zeros_like(q, dtype=lse.dtype), None
        for step, kv in enumerate(around(torch.stack([k, v]), ctx.group)):
            queries = slice(half, None) if step > rank else every
            keys = slice(half) if 0 < step <= rank else every
            rows = (x[:, :, queries] for x in (gradient, q, out, lse))
            more_q, more_kv = flash_backward(*rows, kv[..., keys, :], causal=step == 0)
            dq[:, :, queries] += more_q
            dkv = home() if home else torch.zeros_like(kv, dtype=lse.dtype)
            dkv[..., keys, :] += more_kv
            home = begin_hop(dkv, 1, ctx.group)  # travels beneath the next block
        return dq.to(q.dtype), *home().to(q.dtype), None


def flash_backward(
    gradient: Tensor, q: Tensor, out: Tensor, lse: Tensor, kv: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """A block's part of the gradients of q, and of k and v; `out`, `lse` are of all keys."""
    k, v = (spread(block, q.shape[1]) for block in kv)
    given = gradient, q, k, v, out, lse.squeeze(-1), 0.0, causal
    dq, dk, dv = borrowed.flash_backward.thing(*given)
    return dq, torch.stack([dk, dv]).unflatten(2, (kv.shape[2], -1)).sum(3)  # over each group
