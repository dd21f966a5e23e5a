"""What the chapter trains, and the stages of ZeRO as other programs call them."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam, Optimizer

from mgpu_tutorial.distributed_sgd.sgd import average_gradients
from mgpu_tutorial.sharding.blocks import ShardedBlock, views_of
from mgpu_tutorial.sharding.zero import FlatParameters, Gather, owners, sharded_step
from mgpu_tutorial.shared.models import MLP


class Residual(MLP):
    """Two linear layers with a GELU between them, added to their input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


def new_tower(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Four residual blocks of width 64: 132,352 parameters, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Residual(64) for _ in range(4))).to(dtype)


def loss_of(model: nn.Module, step: int, rank: int, world_size: int) -> torch.Tensor:
    """The loss on this rank's share of the step's 24 samples."""
    generator = torch.Generator(device="cpu").manual_seed(step)
    x = torch.randn(24, 64, generator=generator, dtype=torch.float64, device="cpu")
    mine = x.to(next(model.parameters())).chunk(world_size)[rank]
    return model(mine).square().mean()


class ShardedOptimizer:
    """Stage 1 in the form of an optimizer: `ShardedOptimizer(parameters, Adam, lr=1e-3)`."""

    def __init__(
        self, params: Iterable[nn.Parameter], optimizer_class: type[Optimizer], **kwargs: Any
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


class ShortBlock(ShardedBlock):
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
    """Stage 3 for a module that starts from rank 0's values.

    All parameters are in `shards`; what is left in `module` is the same on every rank.
    Raises ValueError where a parameter is frozen, or shared by two layers.
    """

    def __init__(self, module: nn.Module, compute_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        named = list(module.named_parameters(remove_duplicate=False))
        if len({p for _, p in named if p.requires_grad}) < len(named):
            raise ValueError("a parameter is frozen or shared by two layers: use fully_shard")
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)
        self.module, self.dtype, self.blocks = module, compute_dtype, {}
        self.shard_blocks(self)
        self.shards = nn.ParameterList(block.shard for block in self.blocks.values())
        for block, shard in zip(self.blocks.values(), self.shards, strict=True):
            del block.shard
            vars(block)["shard"] = shard  # which the block uses, and no longer owns

    def shard_blocks(self, module: nn.Module, path: str = "") -> None:
        """Wrap what stands in a Sequential or ModuleList, and else what has parameters."""
        is_stack = isinstance(module, nn.Sequential | nn.ModuleList)
        for name, child in list(module.named_children()):
            inside = f"{path}{name}."
            if list(child.parameters(recurse=is_stack)):
                self.blocks[inside] = ShortBlock(child, self.dtype)
                setattr(module, name, self.blocks[inside])
            else:
                self.shard_blocks(child, inside)

    def forward(self, *inputs: Any) -> torch.Tensor:
        return self.module(*inputs)

    def finish_gradient_synchronization(self) -> None:
        """Nothing is left to do: the shards have their gradients after backward."""

    @torch.no_grad()
    def full_parameters(self) -> dict[str, torch.Tensor]:
        """The whole parameters by name, on every rank; all ranks call it."""
        full = {}
        for path, block in self.blocks.items():
            for name, view in views_of(Gather.apply(block.shard), block.shapes).items():
                full[f"{path}{name}".removeprefix("module.")] = view
        return full


class Prepared(NamedTuple):
    """What computes the loss, the optimizer of this rank, and the step after backward."""

    model: nn.Module
    optimizer: Optimizer
    step: Callable[[], None]


ADAM = partial(Adam, lr=0.01)


def prepare(stage: int, module: nn.Module, kind: Callable = ADAM) -> Prepared:
    """A module at a stage of ZeRO; at stage 0 the gradients are averaged and all is whole."""
    if stage == 1:
        optimizer = ShardedOptimizer(module.parameters(), kind)
        return Prepared(module, optimizer.inner, optimizer.step)
    if stage == 2:
        flat = FlatParameters(module)
        optimizer = kind([flat.shard])
        return Prepared(module, optimizer, partial(flat.step, optimizer))
    model = ShardedModel(module) if stage == 3 else module
    optimizer = kind(model.parameters())
    if stage == 0:
        optimizer.register_step_pre_hook(lambda *_: average_gradients(module))
    return Prepared(model, optimizer, optimizer.step)


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters by name, at any stage; all ranks call it."""
    if isinstance(model, ShardedModel):
        return model.full_parameters()
    return {name: p.detach() for name, p in model.named_parameters()}
