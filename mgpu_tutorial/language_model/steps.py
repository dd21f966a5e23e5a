"""A step of a language model on a plan: pipeline, average, clipping, Adam."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

from mgpu_tutorial.language_model.model import MICRO_BATCHES
from mgpu_tutorial.tensor_parallel.layers import Shard


def forward_backward(
    model: nn.Module, mesh: DeviceMesh, inputs: Tensor, targets: Tensor, order_of: Callable
) -> Tensor:
    """Forward and backward of all micro-batches, in the order of this rank's stage; the loss.

    Activations go to the next stage, gradients come back. Only the last stage knows the
    loss, the others return 0.
    """
    stages = dist.get_process_group_ranks(mesh["pp"].get_group())
    stage, kind = mesh["pp"].get_local_rank(), next(model.parameters())
    before = stages[stage - 1] if stage > 0 else None
    behind = stages[stage + 1] if stage + 1 < len(stages) else None
    xs, ys = inputs.chunk(MICRO_BATCHES), targets.chunk(MICRO_BATCHES)
    kept, sending, loss = {}, [], kind.new_zeros(())
    for task in order_of(stage, len(stages), MICRO_BATCHES):
        i = int(task[1:])
        if task[0] == "F":
            mine = xs[i]
            if before is not None:
                mine = kind.new_empty(*mine.shape, len(kind))  # of a norm: the width
                dist.recv(mine, before)
                mine.requires_grad_()
            output = model(mine)
            if behind is not None:
                sending.append(dist.isend(output.detach(), behind))
            else:
                output = cross_entropy(output.flatten(0, 1), ys[i].flatten()) / MICRO_BATCHES
                loss += output.detach()
            kept[i] = mine, output
        else:
            mine, output = kept.pop(i)
            gradient = None if behind is None else torch.empty_like(output)
            if behind is not None:
                dist.recv(gradient, behind)
            output.backward(gradient)
            if before is not None:
                sending.append(dist.isend(mine.grad, before))
    for work in sending:
        work.wait()
    return loss


def average_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Average all gradients at once, over the ranks with the same part of the model."""
    flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    for name in ("dp", "cp"):
        dist.all_reduce(flat, group=mesh[name].get_group())
    copies = mesh["dp"].size() * mesh["cp"].size()
    sizes = [parameter.numel() for parameter in model.parameters()]
    for parameter, mean in zip(model.parameters(), flat.split(sizes), strict=True):
        parameter.grad.copy_(mean.view_as(parameter) / copies)


def clip_gradients(model: nn.Module, mesh: DeviceMesh) -> Tensor:
    """Shorten all gradients together to the norm 1; each parameter counts once.

    A copy counts on the first rank of its tp group. Returns the norm before.
    """
    first = mesh["tp"].get_local_rank() == 0
    counted = [p for p in model.parameters() if first or isinstance(p, Shard)]
    total = sum(parameter.grad.square().sum() for parameter in counted)
    for name in ("tp", "pp"):
        dist.all_reduce(total, group=mesh[name].get_group())
    norm = total.sqrt()
    for parameter in model.parameters():
        parameter.grad *= min(1.0, 1.0 / norm.item())
    return norm


def broadcast_parameters(model: nn.Module, mesh: DeviceMesh, owner: list[int]) -> None:
    """ZeRO 1: rank owner[i] of each dp group has stepped parameter i, and sends it to all."""
    for parameter, rank in zip(model.parameters(), owner, strict=True):
        dist.broadcast(parameter.data, group=mesh["dp"].get_group(), group_src=rank)
