"""PyTorch's `context_parallel` on CPU ranks, beside one process."""

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional

from mgpu_tutorial.lab import borrowed
from mgpu_tutorial.lab.measure import largest_difference


def out_and_gradients(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """The output of causal attention, and the gradients of q, k and v."""
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    out = functional.scaled_dot_product_attention(*inputs, is_causal=True)
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in inputs)]


def by_context_parallel(rank: int, world_size: int, rotate: str = "allgather") -> float:
    """How far PyTorch's output and gradients of this rank's tokens are from one process."""
    borrowed.let_context_parallel_run_on_cpu()
    borrowed.rotate_by(rotate)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 4, 32, 8, dtype=torch.float64) for _ in range(3))
    buffers = [q, k, v, *out_and_gradients(q, k, v)]
    mesh = init_device_mesh("cpu", (world_size,))
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 7):
        return largest_difference(out_and_gradients(*buffers[:3]), buffers[3:])
