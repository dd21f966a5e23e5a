"""The plan's fifth dimension: ranks that share the batch share the experts as well."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mgpu_tutorial.experts.layer import Experts, run_experts
from mgpu_tutorial.tensor_parallel.block import Block
from mgpu_tutorial.tensor_parallel.layers import Group, shard


def expert_groups(mesh: DeviceMesh, ep: int) -> list[dist.ProcessGroup]:
    """The ranks that share all experts with this one, and those that have the same ones."""
    every = mesh.mesh.unflatten(1, (-1, ep))  # (pp, dp / ep, ep, cp, tp)
    sharing = every.movedim(2, -1).flatten(0, -2)
    copies = every.permute(0, 2, 4, 1, 3).flatten(0, 2).flatten(1)
    rows = sharing.tolist(), copies.tolist()
    return [dist.new_subgroups_by_enumeration(groups)[0] for groups in rows]


def share_experts(
    stage: nn.Sequential, mesh: DeviceMesh, ep: int, parts: Any
) -> dist.ProcessGroup | None:
    """Each rank of an ep group keeps some experts of each block; the characters travel.

    Returns the ranks that keep the same experts.
    """
    if ep == 1:
        return None
    group, copies = expert_groups(mesh, ep)

    def answer(layer: Experts, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        rows = x.repeat_interleave(layer.k, dim=0)
        arrived, which, way = parts.dispatch(rows, chosen.flatten(), layer.experts, group)
        results = run_experts(arrived, which, layer.up, layer.down)
        return parts.combine(results, way, weights, group)

    for layer in (block.mlp for block in stage if isinstance(block, Block)):
        layer.up, layer.down = shard(layer.up, 0, group), shard(layer.down, 0, group)
        layer.answer = partial(answer, layer)
    return copies


class ExpertsDDP(nn.Module):
    """Two DDPs of one kind: for what all ranks of `data` have, and for this rank's experts.

    An expert saw the tokens of all of `data`, and the mean is over the ranks with a copy of
    it, which are `ep` times fewer.
    """

    def __init__(
        self, stage: nn.Sequential, ep: int, wrap: Callable, data: Group, copies: Group
    ) -> None:
        super().__init__()
        self.stage, self.ep = stage, ep
        layers = [layer for layer in stage.modules() if isinstance(layer, Experts)]
        self.own = [p for layer in layers for p in (layer.up, layer.down)]
        others = [p for p in stage.parameters() if all(p is not own for own in self.own)]
        self.dense = wrap(nn.ParameterList(others), group=data)
        self.experts = wrap(nn.ParameterList(self.own), group=copies)

    def forward(self, x: Tensor) -> Tensor:
        return self.stage(x)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.dense.no_sync(), self.experts.no_sync():
            yield

    def finish_gradient_synchronization(self) -> None:
        self.dense.finish_gradient_synchronization()
        self.experts.finish_gradient_synchronization()
        for parameter in self.own:
            parameter.grad /= self.ep
