"""What a step sets around `fully_shard`: micro-batches, precision, clipping, Muon, a mesh."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.optim import Muon

from mgpu_tutorial.fully_shard.units import loss_of, new_model, shard_blocks, share_of_batch
from mgpu_tutorial.shared.models import SmallTransformer


def accumulate_gradients(model: FSDPModule, micro_batches: Sequence[torch.Tensor]) -> None:
    """Backward of each micro-batch; the ranks add up their gradients with the last."""
    for i, tokens in enumerate(micro_batches):
        model.set_requires_gradient_sync(i == len(micro_batches) - 1)
        (loss_of(model, tokens) / len(micro_batches)).backward()


def one_weight(rank: int, world_size: int, policy: MixedPrecisionPolicy) -> tuple:
    """The gradients of a weight are 256 and 1 on two ranks: where it is, and their mean."""
    layer = nn.Linear(1, 1, bias=False)
    fully_shard(layer, mp_policy=policy)
    output = layer(torch.tensor([[256.0 if rank == 0 else 1.0]]))
    output.sum().backward()
    return layer.weight.dtype, output.dtype, layer.weight.grad.full_tensor().item()


def clip(rank: int, world_size: int, limit: float = 0.1) -> list[str]:
    """Two norms of the gradient: of this rank's shards, and the one that PyTorch clips by."""
    model = new_model(torch.float64)
    shard_blocks(model)
    loss_of(model, share_of_batch(rank, world_size)).backward()
    mine = [p.grad.to_local().norm() for p in model.parameters()]
    norm = clip_grad_norm_(model.parameters(), limit)
    return [f"{torch.stack(mine).norm():.2f}", f"{norm.full_tensor():.2f}"]


def moved_by_muon(gradient: torch.Tensor) -> torch.Tensor:
    """How one step of Muon moves a matrix that has this gradient."""
    matrix = nn.Parameter(torch.zeros_like(gradient))
    matrix.grad = gradient
    Muon([matrix], lr=1.0).step()
    return matrix.detach()


def shard_on_a_mesh(model: SmallTransformer, copies: int, shards: int) -> None:
    """Cut the model over each row of `shards` ranks, average over each shard's `copies`."""
    device, names = torch.get_default_device().type, ("copies", "shards")
    mesh = init_device_mesh(device, (copies, shards), mesh_dim_names=names)
    shard_blocks(model, mesh=mesh)
