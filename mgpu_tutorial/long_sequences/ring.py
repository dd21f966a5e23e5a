"""Ring attention: each rank keeps its queries, and the keys and values travel.

Tensors are (batch, heads, tokens, size); there may be fewer heads of keys and values than of
queries. `later` is true where a key is later in the sequence than the query (query, key), and
`deal(length, rank, world_size)` are the positions of a rank's tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mgpu_tutorial.sharding.refusals import require_no_graph
from mgpu_tutorial.shared.groups import size_of
from mgpu_tutorial.shared.parameters import require_agreement

Group = dist.ProcessGroup | None
ASKED: dict[Group, dict[tuple, set]] = {}  # of a group: the shapes, by deal and dtype


def float32_at_least(x: Tensor) -> Tensor:
    """Exponentials and their sums need more digits than 16 bits have."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def scores_of(q: Tensor, k: Tensor, later: Tensor) -> Tensor:
    """Scaled products; where the key is later than the query, the lowest number there is."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.masked_fill(later, torch.finfo(scores.dtype).min)


def spread(block: Tensor, heads: int) -> Tensor:
    """Repeat each head of keys or values for the group of query heads that shares it."""
    repeats, rest = divmod(heads, kv_heads := block.shape[1])
    if rest:
        raise ValueError(f"{heads} heads of queries cannot share {kv_heads} of keys evenly")
    return block.repeat_interleave(repeats, dim=1)


def attend(q: Tensor, k: Tensor, v: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
    """The output of one block, and for each query the log of its sum of exponentials."""
    blocks = q, spread(k, q.shape[1]), spread(v, q.shape[1])
    q, k, v = map(float32_at_least, blocks)
    scores = scores_of(q, k, later)
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp() @ v, lse


def merge(
    out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over the keys of both, from those of each alone."""
    both = torch.logaddexp(lse, block_lse)
    return (lse - both).exp() * out + (block_lse - both).exp() * block_out, both


def contiguous(length: int, rank: int, world_size: int) -> Tensor:
    """A run of neighbours for each rank."""
    require_rank(rank, world_size)
    require_chunks(length, world_size)
    return torch.arange(length).chunk(world_size)[rank]


def zigzag(length: int, rank: int, world_size: int) -> Tensor:
    """One chunk from the front, and the one that is as far from the end."""
    require_rank(rank, world_size)
    require_chunks(length, 2 * world_size)
    chunks = torch.arange(length).chunk(2 * world_size)
    return torch.cat([chunks[rank], chunks[-1 - rank]])


def striped(length: int, rank: int, world_size: int) -> Tensor:
    """Every N-th token."""
    require_rank(rank, world_size)
    require_chunks(length, world_size)
    return torch.arange(rank, length, world_size)


def require_rank(rank: int, world_size: int) -> None:
    """ValueError for a rank that is not there: -1 would be dealt the last one's tokens."""
    if not 0 <= rank < world_size:
        raise ValueError(f"there is no rank {rank} of {world_size}")


def require_chunks(length: int, chunks: int) -> None:
    """ValueError, on every rank and before anything is sent, unless chunks are equal."""
    if length < 1 or chunks < 1:
        raise ValueError(f"{length} tokens in {chunks} chunks: neither can be so few")
    if length % chunks:
        more = -(-length // chunks) * chunks
        raise ValueError(
            f"a sequence of {length} tokens does not divide into {chunks} equal chunks: "
            f"pad it to {more} tokens, and leave the padding out of the loss"
        )


def require_alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    """ValueError, before anything is sent, unless q, k and v belong to the same tokens."""
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if q.dim() != 4 or k.shape != v.shape or any(q.shape[i] != k.shape[i] for i in (0, 2, 3)):
        wanted = "expected (batch, heads, tokens, size), alike in all but the heads of q"
        raise ValueError(f"queries, keys and values are {shapes}: {wanted}")
    if len({q.dtype, k.dtype, v.dtype}) > 1 or not q.is_floating_point():
        given = f"{q.dtype}, {k.dtype} and {v.dtype}"
        raise ValueError(f"queries, keys and values are {given}: expected one float dtype")
    spread(k[:0], q.shape[1])  # refuses heads that do not divide


class Shift(torch.autograd.Function):
    """A tensor goes `by` ranks to the right, and its gradient comes back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, by: int = 1, group: Group = None) -> Tensor:
        ctx.by, ctx.group = by, group
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        if world_size == 1:
            return tensor
        outgoing = tensor.contiguous()
        arriving = torch.empty_like(outgoing)
        right, left = (rank + by) % world_size, (rank - by) % world_size
        there = dist.P2POp(dist.isend, outgoing, group=group, group_peer=right)
        here = dist.P2POp(dist.irecv, arriving, group=group, group_peer=left)
        for work in dist.batch_isend_irecv([there, here]):
            work.wait()
        return arriving

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return Shift.apply(gradient, -ctx.by, ctx.group), None, None


def require_same_deal(deal: Callable, shape: tuple, dtype: str, group: Group) -> None:
    """ValueError, on every rank, unless all of them deal alike, and each position once.

    A rank that dealt otherwise would mask the wrong keys, without a word. While a group knows
    one deal and dtype only, it is asked once for each shape; with a second one, at each call.
    (Where one rank alone comes with a second one, it asks, and waits for the others.)
    """
    asked = ASKED.setdefault(group, {})
    if len(asked) == 1 and shape in asked.get((deal, dtype), ()):
        return  # no rank can have another deal without asking
    ranks = size_of(group)
    if dist.get_backend(group) == "fake":
        return  # a pretended rank has no others, and its positions no numbers
    dealt = [deal(shape[2] * ranks, rank, ranks).tolist() for rank in range(ranks)]
    require_each_position_once(dealt)
    require_agreement({"keys": shape, "dtype": dtype, "positions": dealt}, group)
    if len(asked) < 2:
        asked.setdefault((deal, dtype), set()).add(shape)


def require_each_position_once(dealt: list[list[int]]) -> None:
    """ValueError unless the ranks' positions are those of a sequence, equally many each."""
    every = sorted(sum(dealt, []))
    if every != list(range(len(every))) or len({len(places) for places in dealt}) > 1:
        begin = [places[:4] for places in dealt[:4]]
        raise ValueError(
            f"the deal gives the ranks positions that begin with {begin}: it must give each "
            "position of the sequence to one rank, equally many to each"
        )


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, deal: Callable, group: Group = None
) -> tuple[Tensor, Tensor]:
    """Causal attention of this rank's queries over the keys of all; also its log-sum-exp.

    Both come in float32 at least, in which the blocks are merged.
    """
    require_alike(q, k, v)
    require_same_deal(deal, k.shape, str(k.dtype), group)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    length = q.shape[2] * world_size
    mine = deal(length, rank, world_size)
    out, lse = attend(q, k, v, mine > mine[:, None])
    kv = torch.stack([k, v])
    for step in range(1, world_size):
        kv = Shift.apply(kv, 1, group)
        theirs = deal(length, (rank - step) % world_size, world_size)
        out, lse = merge(out, lse, *attend(q, *kv, theirs > mine[:, None]))
    return out, lse


class RingAttention(torch.autograd.Function):
    """`ring_attention` that keeps no block: backward sends all of them around once more."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, deal: Callable, group: Group = None
    ) -> Tensor:
        out, lse = ring_attention(q, k, v, deal, group)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.deal, ctx.group = deal, group
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        require_no_graph("RingAttention")
        q, k, v, out, lse = ctx.saved_tensors
        rank, world_size = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
        places = [ctx.deal(q.shape[2] * world_size, r, world_size) for r in range(world_size)]
        inner = (gradient * out).sum(-1, keepdim=True)
        kv, dq, dkv = torch.stack([k, v]), 0, 0
        for step in range(world_size):
            if step > 0:
                kv, dkv = (Shift.apply(x, 1, ctx.group) for x in (kv, dkv))
            later = places[rank - step] > places[rank][:, None]
            more_q, more_kv = attend_backward(q, kv, later, lse, gradient, inner)
            dq, dkv = dq + more_q, dkv + more_kv
        return dq, *go_home(dkv, ctx.group), None, None


def attend_backward(
    q: Tensor, kv: Tensor, later: Tensor, lse: Tensor, gradient: Tensor, inner: Tensor
) -> tuple[Tensor, Tensor]:
    """What one block adds to the gradients of q, and of k and v; `lse` is of all keys."""
    k, v = (float32_at_least(spread(block, q.shape[1])) for block in kv)
    q, gradient = float32_at_least(q), float32_at_least(gradient)
    weights = (scores_of(q, k, later) - lse).exp()
    dscores = weights * (gradient @ v.mT - inner) / q.shape[-1] ** 0.5
    dkv = torch.stack([dscores.mT @ q, weights.mT @ gradient])
    return dscores @ k, dkv.unflatten(2, (kv.shape[2], -1)).sum(3)  # over each group


def go_home(gradients: Tensor, group: Group = None) -> Tensor:
    """After N - 1 hops a block's gradients are one rank to the left of its own."""
    return Shift.apply(gradients, 1, group)
