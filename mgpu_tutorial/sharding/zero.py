"""The three stages of ZeRO, as the page has them (https://arxiv.org/abs/1910.02054).

Stage 1 steps a parameter where it is owned, stage 2 a shard of all parameters in one flat
tensor. At stage 3 a parameter is whole only while it is used. All ranks have equally many
samples in each step: the mean of their means is else not that of the batch.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import vector_to_parameters
from torch.nn.utils.parametrize import register_parametrization
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from mgpu_tutorial.shared.groups import size_of


def owners(parameters: list[nn.Parameter], world_size: int) -> list[int]:
    """The owner of each parameter: the largest first, each to the rank with least so far."""
    owner, owned = [0] * len(parameters), [0] * world_size
    for i in sorted(range(len(parameters)), key=lambda i: -parameters[i].numel()):
        owner[i] = owned.index(min(owned))
        owned[owner[i]] += parameters[i].numel()
    return owner


def sharded_step(
    parameters: Iterable[nn.Parameter],
    owner: list[int],
    optimizer: Optimizer,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Rank owner[i] gets the mean gradient of parameter i, steps it, and sends it to all.

    Owners are ranks of the group, all ranks by default. `optimizer` has the parameters that
    this rank owns; if there are none, give it `[{"params": []}]`. All ranks begin with the
    same values. Clip in a hook before its step: here gradients become means. `prove` it.
    """
    pairs = list(zip(parameters, owner, strict=True))
    pairs = [(p, rank) for p, rank in pairs if p.requires_grad]
    for i, (p, _) in enumerate(pairs):
        if p.grad is None:
            raise RuntimeError(f"trained parameter {i}, {tuple(p.shape)}, got no gradient")
        if hasattr(p.grad, "averaged"):
            raise RuntimeError("already averaged gradients: zero_grad() first")
    for p, rank in pairs:
        dist.reduce(p.grad, group_dst=rank, group=group)
        p.grad /= dist.get_world_size(group)
        p.grad.averaged = True
    optimizer.step()
    for p, rank in pairs:
        dist.broadcast(p.data, group_src=rank, group=group)


def flatten(
    tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """The tensors side by side, padded with zeros so that all shards are equally long."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    return nn.functional.pad(flat, (0, -len(flat) % size_of(group)))


def shard_of(flat: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """This rank's shard of a flat tensor: a view."""
    return flat.chunk(dist.get_world_size(group))[dist.get_rank(group)]


class FlatParameters:
    """The trained parameters of a module in one flat tensor; the optimizer gets `shard`.

    All ranks begin with the same values. A step takes the gradients away, so none is kept
    for the next one. Clip by `clip_shards`. Not general: `prove` it on your model.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self.parameters = [p for p in module.parameters() if p.requires_grad]
        self.flat, self.group = flatten(self.parameters, group), group
        vector_to_parameters(self.flat, self.parameters)  # each is a view of it now
        self.shard = nn.Parameter(shard_of(self.flat, group))  # a view: its step moves them
        self.shard.sharded, self.shard.group = True, group
        self.shard.whole_tensors = self.whole_tensors

    def whole_tensors(self, own: torch.Tensor) -> dict[nn.Parameter, torch.Tensor]:
        """Of this rank's shard, or of its gradient, what belongs to each parameter."""
        whole, found = Gather.apply(own.detach(), self.group), {}
        for parameter in self.parameters:
            found[parameter] = whole[: parameter.numel()].view_as(parameter)
            whole = whole[parameter.numel() :]
        return found

    def step(self, optimizer: Optimizer) -> None:
        """Reduce-scatter the gradients, step this rank's shard, all-gather the new values."""
        gradient = flatten((p.grad for p in self.parameters), self.group)
        for parameter in self.parameters:
            parameter.grad = None
        self.shard.grad = torch.empty_like(self.shard)
        dist.reduce_scatter_single(self.shard.grad, gradient, group=self.group)
        self.shard.grad /= dist.get_world_size(self.group)
        optimizer.step()
        dist.all_gather_single(self.flat, self.shard.detach().clone(), group=self.group)


class Gather(torch.autograd.Function):
    """From this rank's shard to the whole flat tensor; the group is all ranks by default."""

    @staticmethod
    def forward(
        ctx: Any, shard: torch.Tensor, group: dist.ProcessGroup | None = None
    ) -> torch.Tensor:
        ctx.group = group
        whole = shard.new_empty(dist.get_world_size(group) * len(shard))
        dist.all_gather_single(whole, shard, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ranks = dist.get_world_size(ctx.group)
        shard = gradient.new_empty(len(gradient) // ranks)
        dist.reduce_scatter_single(shard, gradient, group=ctx.group)
        return shard / ranks, None


class Unsharded(nn.Module):
    """Keeps a parameter as this rank's shard, and gives the whole one to whoever reads it."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape

    def right_inverse(self, whole: torch.Tensor) -> torch.Tensor:
        return shard_of(flatten([whole])).clone()

    def forward(self, shard: torch.Tensor) -> torch.Tensor:
        return Gather.apply(shard)[: self.shape.numel()].view(self.shape)


def shard_parameters(module: nn.Module) -> None:
    """Keep a shard of every parameter, which is gathered each time it is read."""
    for part in list(module.modules()):
        for name, parameter in list(part.named_parameters(recurse=False)):
            unsharded = Unsharded(parameter.shape)
            register_parametrization(part, name, unsharded, unsafe=True)
            parameter.sharded = True  # it holds this rank's shard now


def recompute(block: nn.Module) -> None:
    """The block keeps its input only, and computes the rest again in backward."""
    block.forward = partial(checkpoint, block.forward, use_reentrant=False)
