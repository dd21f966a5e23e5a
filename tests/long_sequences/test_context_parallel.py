"""PyTorch's `context_parallel` is one process, unless attention was imported by name."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as theirs
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from mgpu_tutorial.lab.measure import largest_difference


def by_context_parallel(rank: int, world_size: int) -> float:
    """How far PyTorch's output and gradients of this rank's tokens are from one process."""
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


def imported_by_name(rank, world_size):
    global functional  # in this rank only
    functional = SimpleNamespace(scaled_dot_product_attention=scaled_dot_product_attention)
    return by_context_parallel(rank, world_size)


def test_pytorch_s_is_one_process(ranks):
    assert max(ranks(4, by_context_parallel, device="cpu").results) < 1e-13


def test_pytorch_s_does_not_reach_an_attention_that_was_imported_by_name(ranks):
    assert min(ranks(4, imported_by_name, device="cpu").results) > 0.1
