"""Stage 1 as an optimizer, and stage 3 for any module: what other programs call."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.sharding.blocks import Block
from mgpu_tutorial.sharding.zero1 import owners, sharded_step
from mgpu_tutorial.sharding.zero2 import views_of
from mgpu_tutorial.sharding.zero3 import Gather


class ShardedOptimizer:
    """Stage 1 in the form of an optimizer: `ShardedOptimizer(parameters, Adam, lr=1e-3)`.

    All ranks pass the same parameters, and each gives its own gradients.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        optimizer_class: type[torch.optim.Optimizer],
        **kwargs: Any,
    ) -> None:
        self.parameters = [p for p in params if p.requires_grad]
        self.owner = owners(self.parameters, dist.get_world_size())
        pairs = zip(self.parameters, self.owner, strict=True)
        mine = [parameter for parameter, rank in pairs if rank == dist.get_rank()]
        self.inner = optimizer_class([{"params": mine}], **kwargs)  # which may be none

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        sharded_step(self.parameters, self.owner, self.inner)


class ShortBlock(Block):
    """Computes and sends in a shorter dtype; the shard keeps its own, as master weights."""

    def __init__(self, module: nn.Module, dtype: torch.dtype | None) -> None:
        super().__init__(module)
        self.dtype = dtype or self.shard.dtype

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        short = [x.to(self.dtype) if x.is_floating_point() else x for x in inputs]
        return super().forward(*short).to(self.shard.dtype)

    def unshard(self) -> torch.Tensor:
        return Gather.apply(self.shard.to(self.dtype))


class ShardedModel(nn.Module):
    """A module that starts from rank 0's values, sharded block by block.

    Gradients are complete after backward. Raises ValueError where layers share a parameter.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        if len(names) > len(list(module.parameters())):
            raise ValueError(
                "two layers share a parameter, and each would keep a shard of its own: "
                "build the model with tied=False, or use fully_shard"
            )
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)
        self.frozen = {n: p for n, p in module.named_parameters() if not p.requires_grad}
        self.module, self.dtype = module, compute_dtype
        self.shard_blocks(self)
        self.blocks = {
            f"{path}.".removeprefix("module."): part
            for path, part in self.named_modules()
            if isinstance(part, ShortBlock)
        }

    def shard_blocks(self, module: nn.Module) -> None:
        """Wrap what stands in a Sequential or ModuleList, and else what has parameters."""
        is_stack = isinstance(module, nn.Sequential | nn.ModuleList)
        for name, child in list(module.named_children()):
            is_layer = any(p.requires_grad for p in child.parameters(recurse=False))
            is_trained = any(p.requires_grad for p in child.parameters())
            if is_layer or (is_stack and is_trained):
                setattr(module, name, ShortBlock(child, self.dtype))
            else:
                self.shard_blocks(child)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    def finish_gradient_synchronization(self) -> None:
        """Nothing is left to do: the shards have their gradients."""

    @torch.no_grad()
    def full_parameters(self) -> dict[str, torch.Tensor]:
        """The whole parameters by name, on every rank; all ranks call it."""
        full = {name: p.detach() for name, p in self.frozen.items()}
        for prefix, block in self.blocks.items():
            views = views_of(Gather.apply(block.shard), block.shapes.values())
            full |= {prefix + name: v for name, v in zip(block.shapes, views, strict=True)}
        return full
