"""A step of a language model on a plan: pipeline, average, clipping, Adam."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

from mgpu_tutorial.tensor_parallel.layers import Shard


def forward_backward(
    model: nn.Module,
    mesh: DeviceMesh,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    micro_batches: int,
    order_of: Callable[[int, int, int], list[str]],
) -> torch.Tensor:
    """Forward and backward of all micro-batches, in the order of this rank's stage; the loss.

    Activations go to the next stage, gradients come back. Only the last stage knows the
    loss, the others return 0.
    """
    stages = dist.get_process_group_ranks(mesh["pp"].get_group())
    stage, kind = mesh["pp"].get_local_rank(), next(model.parameters())
    before = stages[stage - 1] if stage > 0 else None
    behind = stages[stage + 1] if stage + 1 < len(stages) else None
    xs, ys = inputs.chunk(micro_batches), targets.chunk(micro_batches)
    kept, sending, loss = {}, [], kind.new_zeros(())
    for task in order_of(stage, len(stages), micro_batches):
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
                output = cross_entropy(output.flatten(0, 1), ys[i].flatten()) / micro_batches
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


def clip_gradients(model: nn.Module, mesh: DeviceMesh, longest: float = 1.0) -> torch.Tensor:
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
        parameter.grad *= min(1.0, longest / norm.item())
    return norm


class Adam:
    """AdamW; with owners each rank of a dp group steps its own parameters only (ZeRO 1).

    The rank number owners[i] of the group steps parameter i, and sends the others the new
    value.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, lr: float, owners: Sequence[int] | None
    ) -> None:
        self.parameters, self.owners = list(model.parameters()), owners
        self.group, me = mesh["dp"].get_group(), mesh["dp"].get_local_rank()
        self.ranks = dist.get_process_group_ranks(self.group)
        mine = [p for i, p in enumerate(self.parameters) if not owners or owners[i] == me]
        self.adam = torch.optim.AdamW(mine, lr=lr)

    def step(self) -> None:
        self.adam.step()
        for i, owner in enumerate(self.owners or ()):
            dist.broadcast(self.parameters[i].data, self.ranks[owner], group=self.group)
        for parameter in self.parameters:
            parameter.grad = None
