"""PyTorch's `context_parallel` on CPU ranks, beside one process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs
from torch.nn import functional

from mgpu_tutorial.lab.measure import largest_difference


def out_and_gradients(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The output of causal attention, and the gradients of q, k and v."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = functional.scaled_dot_product_attention(*inputs, is_causal=True)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in inputs)]


def by_context_parallel(rank: int, world_size: int, rotate: str = "allgather") -> float:
    """How far PyTorch's output and gradients of this rank's tokens are from one process."""
    let_context_parallel_run_on_cpu()
    set_rotate_method(rotate)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 4, 32, 8, dtype=torch.float64).unbind()
    buffers = [q, k, v, *out_and_gradients(q, k, v)]
    mesh = init_device_mesh("cpu", (world_size,))
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 7):
        return largest_difference(out_and_gradients(*buffers[:3]), buffers[3:])


def let_context_parallel_run_on_cpu() -> None:
    """Teach `context_parallel` the attention of CPUs: PyTorch's handlers know GPUs only."""
    aten = torch.ops.aten
    attend = aten._scaled_dot_product_flash_attention_for_cpu.default
    go_back = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    def attend_to_block(q, k, v, is_causal):
        return attend(q.contiguous(), k.contiguous(), v.contiguous(), 0.0, is_causal)

    def go_back_through_block(query, key, value, out, logsumexp, is_causal, grad_out):
        return go_back(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

    def on_ranks(ring: Callable, *given: Any) -> tuple[DTensor, ...]:
        mesh, placements = given[-1].device_mesh, given[-1].placements
        local = [x.to_local() if isinstance(x, DTensor) else x for x in given]
        found = ring(mesh.get_group(), 2, *local, is_causal=True)
        return tuple(DTensor.from_local(x, mesh, placements) for x in found)

    def forward(operator, given, named):
        return on_ranks(theirs._templated_ring_attention, attend_to_block, *given[:3])

    def backward(operator, given, named):
        ring = theirs._templated_ring_attention_backward
        return on_ranks(ring, go_back_through_block, given[0], "grad_out", *given[1:6])

    theirs.custom_ops |= {attend: forward, go_back: backward}
    theirs._cp_options.convert_to_f32 = False  # partial results keep the dtype of the queries
