"""Ring attention: each rank keeps its queries, and the keys and values travel.

Tensors are (batch, heads, tokens, size); there may be fewer heads of keys and values than of
queries. `hidden` is true where a query must not see a key (query, key), such as a later one,
and `deal(length, rank, world_size)` are the positions of a rank's tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgpu_tutorial.shared.guards import divides

Group = dist.ProcessGroup | None


def float32_at_least(x: Tensor) -> Tensor:
    """Exponentials and their sums need more digits than 16 bits have."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def scores_of(q: Tensor, k: Tensor, hidden: Tensor) -> Tensor:
    """Scaled products; where the key is hidden from the query, the lowest number there is."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(hidden, torch.finfo(scores.dtype).min)


def spread(block: Tensor, heads: int) -> Tensor:
    """Repeat each head of keys or values for the group of query heads that shares it."""
    return block.repeat_interleave(heads // block.shape[1], dim=1)


def attend(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The output of one block, and for each query the log of its sum of exponentials."""
    blocks = q, spread(k, q.shape[1]), spread(v, q.shape[1])
    q, k, v = map(float32_at_least, blocks)
    with torch.autocast(q.device.type, enabled=False):  # which takes 16 bits again
        scores = scores_of(q, k, hidden)
        lse = scores.logsumexp(-1, keepdim=True)
        return (scores - lse).exp() @ v, lse


def merge(
    out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over the keys of both, from those of each alone."""
    both = torch.logaddexp(lse, block_lse)
    merged = (lse - both).exp() * out + (block_lse - both).exp() * block_out
    return merged, both


def contiguous(length: int, rank: int, world_size: int) -> Tensor:
    """A run of neighbours for each rank."""
    divides("tokens", length, world_size)
    return torch.arange(length).chunk(world_size)[rank]


def zigzag(length: int, rank: int, world_size: int) -> Tensor:
    """One chunk from the front, and the one that is as far from the end."""
    missing = -length % (2 * world_size)
    if missing:
        raise ValueError(f"{length} tokens: pad them to {length + missing}")
    chunks = torch.arange(length).chunk(2 * world_size)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def striped(length: int, rank: int, world_size: int) -> Tensor:
    """Every N-th token."""
    divides("tokens", length, world_size)
    return torch.arange(rank, length, world_size)


def places_of(q: Tensor, deal: Callable, world_size: int) -> list[Tensor]:
    """The positions of each rank's tokens; ValueError unless all have as many as this one."""
    tokens = q.shape[2]
    dealt = [deal(tokens * world_size, rank, world_size) for rank in range(world_size)]
    counts = [len(places) for places in dealt]
    if counts != [tokens] * world_size:
        raise ValueError(f"{tokens} tokens here, and `deal` gives {counts}: pad the sequence")
    return [places.to(q.device) for places in dealt]


def is_later(queries: Tensor, keys: Tensor) -> Tensor:
    """Causal attention hides from each query (query, key) the keys at later positions."""
    return keys > queries[:, None]


def begin_hop(tensor: Tensor, by: int = 1, group: Group = None) -> Callable[[], Tensor]:
    """Start to send a tensor `by` ranks to the right; the result waits for what arrives."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if world_size == 1:
        return lambda: tensor
    outgoing = tensor.contiguous()
    arriving = torch.empty_like(outgoing)
    right, left = (rank + by) % world_size, (rank - by) % world_size
    there = dist.P2POp(dist.isend, outgoing, group=group, group_peer=right)
    here = dist.P2POp(dist.irecv, arriving, group=group, group_peer=left)
    works = dist.batch_isend_irecv([there, here])

    def finish() -> Tensor:
        for work in works:
            work.wait()
        return arriving

    return finish


class Shift(torch.autograd.Function):
    """A tensor goes `by` ranks to the right, and its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, by: int = 1, group: Group = None) -> Tensor:
        ctx.by, ctx.group = by, group
        return begin_hop(tensor, by, group)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return Shift.apply(gradient, -ctx.by, ctx.group), None, None


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    deal: Callable,
    group: Group = None,
    hides: Callable = is_later,
) -> tuple[Tensor, Tensor]:
    """Attention of this rank's queries over the keys of all; also its log-sum-exp.

    All ranks have the same `deal`, and equally many tokens. `hides(queries, keys)`, of their
    positions, is true where a query must not see a key. For attention both ways it is
    `lambda queries, keys: keys < 0`, and `padding[:, None, None, keys]` hides a padding that
    each rank has whole (batch, length).
    Blocks are merged in float32 at least; the output has the queries' dtype.
    """
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    places = places_of(q, deal, world_size)
    out, lse = attend(q, k, v, hides(places[rank], places[rank]))
    kv = torch.stack([k, v])
    for step in range(1, world_size):
        kv = Shift.apply(kv, 1, group)
        hidden = hides(places[rank], places[rank - step])
        out, lse = merge(out, lse, *attend(q, *kv, hidden))
    return out.to(q.dtype), lse


class RingAttention(torch.autograd.Function):
    """`ring_attention` that keeps no block: backward sends all around once more."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        deal: Callable,
        group: Group = None,
        hides: Callable = is_later,
    ) -> Tensor:
        out, lse = ring_attention(float32_at_least(q), k, v, deal, group, hides)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.deal, ctx.group, ctx.hides = deal, group, hides
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        rank, world_size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        places = places_of(q, ctx.deal, world_size)
        inner = (gradient * out).sum(-1, keepdim=True)
        kv, dq, dkv = torch.stack([k, v]), 0, 0
        for step in range(world_size):
            if step > 0:
                kv, dkv = (Shift.apply(x, 1, ctx.group) for x in (kv, dkv))
            hidden = ctx.hides(places[rank], places[rank - step])
            more_q, more_kv = attend_backward(q, kv, hidden, lse, gradient, inner)
            dq, dkv = dq + more_q, dkv + more_kv
        return dq, *go_home(dkv, ctx.group), None, None, None


def attend_backward(
    q: Tensor, kv: Tensor, hidden: Tensor, lse: Tensor, gradient: Tensor, inner: Tensor
) -> tuple[Tensor, Tensor]:
    """What one block adds to the gradients of q, and of k and v; `lse` is of all keys."""
    k, v = (float32_at_least(spread(block, q.shape[1])) for block in kv)
    q, gradient = float32_at_least(q), float32_at_least(gradient)
    weights = (scores_of(q, k, hidden) - lse).exp()
    dscores = weights * (gradient @ v.mT - inner) / q.shape[-1] ** 0.5
    dkv = torch.stack([dscores.mT @ q, weights.mT @ gradient])
    return dscores @ k, dkv.unflatten(2, (kv.shape[2], -1)).sum(3)  # over each group


def go_home(gradients: Tensor, group: Group = None) -> Tensor:
    """After N - 1 hops a block's gradients are one rank to the left of its own."""
    return Shift.apply(gradients, 1, group)
