"""Ring attention: each rank keeps its queries, and the keys and values travel."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgpu_tutorial.long_sequences.blocks import attend, attend_backward, merge

Deal = Callable[[int, int, int], Tensor]  # length, rank, world_size: its positions


def pass_on(tensor: Tensor, by: int = 1) -> Tensor:
    """Send a tensor `by` ranks to the right; returns the one that arrives from the left."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        return tensor
    outgoing = tensor.contiguous()
    arriving = torch.empty_like(outgoing)
    there = dist.P2POp(dist.isend, outgoing, (rank + by) % world_size)
    here = dist.P2POp(dist.irecv, arriving, (rank - by) % world_size)
    for work in dist.batch_isend_irecv([there, here]):
        work.wait()
    return arriving


class Shift(torch.autograd.Function):
    """A tensor goes one rank to the right, and its gradient one rank to the left."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return pass_on(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return pass_on(gradient, by=-1)


def ring_attention(q: Tensor, k: Tensor, v: Tensor, deal: Deal) -> tuple[Tensor, Tensor]:
    """Causal attention of this rank's queries over the keys of all; also its log-sum-exp."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    length = q.shape[2] * world_size
    mine = deal(length, rank, world_size)
    out, lse = attend(q, k, v, mine > mine[:, None])
    kv = torch.stack([k, v])
    for step in range(1, world_size):
        kv = Shift.apply(kv)
        theirs = deal(length, (rank - step) % world_size, world_size)
        out, lse = merge(out, lse, *attend(q, *kv, theirs > mine[:, None]))
    return out, lse


class RingAttention(torch.autograd.Function):
    """`ring_attention` that keeps no block: backward sends all of them around once more."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, deal: Deal) -> Tensor:
        out, lse = ring_attention(q, k, v, deal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.deal = deal
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, world_size = dist.get_rank(), dist.get_world_size()
        places = [ctx.deal(q.shape[2] * world_size, r, world_size) for r in range(world_size)]
        inner = (gradient * out).sum(-1, keepdim=True)
        kv, dq, dkv = torch.stack([k, v]), 0, 0
        for step in range(world_size):
            if step > 0:
                kv, dkv = pass_on(kv), pass_on(dkv)
            later = places[rank - step] > places[rank][:, None]
            more_q, more_kv = attend_backward(q, kv, later, lse, gradient, inner)
            dq, dkv = dq + more_q, dkv + more_kv
        return dq, *go_home(dkv), None


def go_home(gradients: Tensor) -> Tensor:
    """After N - 1 hops a block's gradients are one rank to the left of its own."""
    return pass_on(gradients)
