"""Other ways to share attention: all keys gathered, tokens for heads, and PyTorch's own."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.long_sequences.ring import (
    Group,
    RingAttention,
    attend,
    contiguous,
    require_alike,
    require_chunks,
    require_same_deal,
    spread,
)
from mgpu_tutorial.shared.groups import size_of
from mgpu_tutorial.tensor_parallel_in_practice.sequence import GatherSequence


def gathered_attention(
    q: Tensor, k: Tensor, v: Tensor, deal: Callable, group: Group = None
) -> Tensor:
    """Causal attention of this rank's queries; every rank holds all keys and values."""
    require_alike(q, k, v)
    require_same_deal(deal, k.shape, str(k.dtype), group)
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    places = [deal(q.shape[2] * world_size, r, world_size) for r in range(world_size)]
    kv = torch.stack([k, v])
    every = GatherSequence.apply(kv.flatten(0, 2), group).unflatten(0, kv.shape[:3])
    return attend(q, *every, torch.cat(places) > places[rank][:, None])[0].to(q.dtype)


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


def require_neighbours(deal: Callable, length: int, world_size: int) -> None:
    """ValueError unless the ranks' tokens, one after the other, are the whole sequence."""
    dealt = torch.cat([deal(length, rank, world_size) for rank in range(world_size)])
    if dealt.tolist() != list(range(length)):
        raise ValueError(
            f"Ulysses joins the ranks' tokens in order, and this deal begins with the tokens "
            f"{dealt[:4].tolist()}: deal neighbours to each rank, or take a ring"
        )


def ulysses(
    q: Tensor, k: Tensor, v: Tensor, group: Group = None, deal: Callable = contiguous
) -> Tensor:
    """Causal attention of neighbouring tokens: each rank has some heads of all tokens."""
    require_alike(q, k, v)
    world_size, heads, kv_heads = size_of(group), q.shape[1], k.shape[1]
    if heads % world_size or (kv_heads % world_size and world_size % kv_heads):
        text = f"{heads} heads and {kv_heads} of keys do not divide among {world_size} ranks"
        raise ValueError(f"{text}: take fewer ranks, or a ring, which cuts no head")
    require_same_deal(deal, k.shape, str(k.dtype), group)
    if dist.get_backend(group) != "fake":  # whose positions have no numbers
        require_neighbours(deal, q.shape[2] * world_size, world_size)
    k, v = (spread(x, max(world_size, kv_heads)) for x in (k, v))
    q, k, v = (Exchange.apply(x, 1, 2, group) for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return Exchange.apply(out, 2, 1, group)


METHODS: Mapping[str, Callable] = {  # of queries, keys, values and a deal
    "ring": RingAttention.apply,
    "all-gather": gathered_attention,
    "ulysses": lambda q, k, v, deal: ulysses(q, k, v, deal=deal),
}


def sent_by_formula(method: str, ranks: int, d: int, group: int, tokens: int) -> float:
    """Numbers that a rank sends in forward for tokens of width `d`, by attention's method.

    `group` queries share a head of keys, of which there are as many as ranks or more.
    """
    unit = tokens * d / ranks
    if method == "ulysses":
        return (ranks - 1) / ranks * unit * (2 + 2 / group)
    return 2 * (ranks - 1) * unit / group


def by_context_parallel(rank: int, world_size: int) -> float:
    """How far PyTorch's output and gradients of this rank's tokens are from one process."""
    require_chunks(32, 2 * world_size)  # of 32 tokens
    let_context_parallel_run_on_cpu()
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 32, 8, dtype=torch.float64).unbind()
    buffers = [q, k, v, *out_and_gradients(q, k, v)]
    mesh = init_device_mesh("cpu", (world_size,))
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 7):
        return largest_difference(out_and_gradients(*buffers[:3]), buffers[3:])


def out_and_gradients(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The output of causal attention, and the gradients of q, k and v."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = functional.scaled_dot_product_attention(*inputs, is_causal=True)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in inputs)]


def let_context_parallel_run_on_cpu() -> None:
    """Teach `context_parallel` the attention of CPUs: PyTorch's handlers know GPUs only."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    go_back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def on_ranks(ring: Callable, *given: Any) -> tuple[DTensor, ...]:
        mesh, placements = given[-1].device_mesh, given[-1].placements
        local = [x.to_local() if isinstance(x, DTensor) else x for x in given]
        found = ring(mesh.get_group(), 2, *local, is_causal=True, dropout_p=0.0)
        return tuple(DTensor.from_local(x, mesh, placements) for x in found)

    def forward(operator, given, named):
        return on_ranks(theirs._templated_ring_attention, attend, *given[:3])

    def backward(operator, given, named):
        ring = theirs._templated_ring_attention_backward
        return on_ranks(ring, go_back, given[0], "grad_out", *given[1:6])

    theirs.custom_ops |= {attend: forward, go_back: backward}
    theirs._cp_options.convert_to_f32 = False  # results keep the queries' dtype
