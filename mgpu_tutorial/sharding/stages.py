"""What the chapter trains, and the stages of ZeRO as other programs call them."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam, Optimizer
from torch.utils.hooks import RemovableHandle

from mgpu_tutorial.distributed_sgd.sgd import average_gradients
from mgpu_tutorial.sharding.blocks import ShardedBlock, blocks_in, fully_sharded
from mgpu_tutorial.sharding.zero import FlatParameters, Gather, owners, sharded_step
from mgpu_tutorial.shared.groups import size_of
from mgpu_tutorial.shared.guards import divides, one_of, positive
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
    divides("samples", 24, world_size)
    x = torch.randn(24, 64, generator=generator, dtype=torch.float64, device="cpu")
    mine = x.to(next(model.parameters())).chunk(world_size)[rank]
    return model(mine).square().mean()


class ShardedOptimizer:
    """Stage 1 in the form of an optimizer: `ShardedOptimizer(parameters, Adam, lr=1e-3)`.

    Takes groups too, `[{"params": [...], "lr": 0.1}, ...]`, as every optimizer does. What is
    frozen is left out, and stays so. All ranks give the same parameters in the same order,
    and start from rank 0's values. Clip by `clip_shards`. A scheduler takes `.inner`, which
    is stepped by this `step` only. `group` are the ranks that share the work, all by default.
    Not general: `prove` it on your model.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        optimizer_class: type[Optimizer],
        *,
        group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        groups = list(params)
        if not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        trained = [[p for p in options["params"] if p.requires_grad] for options in groups]
        self.parameters, self.group = sum(trained, []), group
        self.owner = owners(self.parameters, size_of(group))
        for parameter in self.parameters:
            dist.broadcast(parameter.data, group=group, group_src=0)
        pairs = zip(self.parameters, self.owner, strict=True)
        mine = {parameter for parameter, rank in pairs if rank == dist.get_rank(group)}
        groups = [
            options | {"params": [p for p in every if p in mine]}  # perhaps none
            for options, every in zip(groups, trained, strict=True)
        ]
        self.inner = optimizer_class(groups, **kwargs)
        self.inner.zero_grad = self.zero_grad  # of what others own too

    def zero_grad(self, set_to_none: bool = True) -> None:
        """None, on every rank, for the gradients of all parameters: never zeros."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        sharded_step(self.parameters, self.owner, self.inner, self.group)


class FlatOptimizer:
    """Stage 2 in the form of an optimizer: `FlatOptimizer(parameters, Adam, lr=1e-3)`.

    All ranks give the same parameters, with the same values. Its step takes the gradients.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], kind: type, **options: Any
    ) -> None:
        self.flat = FlatParameters(nn.ParameterList(parameters))
        self.inner = kind([self.flat.shard], **options)

    def step(self) -> None:
        self.flat.step(self.inner)

    def zero_grad(self) -> None:
        """Nothing is left to do: `step` has taken the gradients away."""


def in_dtype(value: Any, dtype: torch.dtype) -> Any:
    """Tensors of floats in this dtype, in tuples, lists and dicts too; all else as it is."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {name: in_dtype(part, dtype) for name, part in value.items()}
    if type(value) in (tuple, list):
        return type(value)(in_dtype(part, dtype) for part in value)
    return value


class ShortBlock(ShardedBlock):
    """Computes and sends in a shorter dtype; the shard keeps its own, as master weights."""

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(module, group)
        self.dtype = dtype or self.shard.dtype

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return super().forward(
            *in_dtype(inputs, self.dtype), **in_dtype(keywords, self.dtype)
        )

    def unshard(self) -> torch.Tensor:
        return Gather.apply(self.shard.to(self.dtype), self.group)


STACKS = nn.Sequential, nn.ModuleList, nn.ModuleDict


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """What stands in the outermost stacks of a module and has parameters, each once."""
    found: dict[nn.Module, None] = {}
    for child in module.children():
        if isinstance(module, STACKS) and not isinstance(child, STACKS[1:]):
            found |= {child: None} if list(child.parameters()) else {}
        else:
            found |= dict.fromkeys(blocks_of(child))
    return list(found)


class ShardedModel(nn.Module):
    """Stage 3 for a module that starts from rank 0's values.

    `blocks` are gathered one by one: by default what stands in a Sequential, a ModuleList or
    a ModuleDict. The root, for all the rest, is whole during the model's forward. `group` are
    the ranks that share the model, all by default.

    Each forward gathers, so all ranks call it, to evaluate too, and use the blocks in the
    same order. All parameters are in `shards`. To freeze a block call its `requires_grad_`.
    Each shard has one dimension, so an optimizer that looks at rows or at a whole tensor sees
    none, and no rule such as "decay what has two" finds one. Load a whole model before it is
    sharded. Clip by `clip_shards`. Not general: `prove` it on your model.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        blocks: Iterable[nn.Module] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        units = blocks_of(module) if blocks is None else list(blocks)
        paths = {part: f"{path}." for path, part in module.named_modules()}
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), group=group, group_src=0)
        kind = partial(ShortBlock, dtype=compute_dtype)
        self.dtype = compute_dtype
        self.module = fully_sharded(module, units, group, kind)
        self.blocks = {paths[block.module]: block for block in blocks_in(self.module)}
        self.shards = nn.ParameterList(block.shard for block in self.blocks.values())
        for block, shard in zip(self.blocks.values(), self.shards, strict=True):
            del block.shard
            vars(block)["shard"] = shard  # which the block uses, and no longer owns

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        output = self.module(*inputs, **keywords)
        return in_dtype(output, self.shards[0].dtype) if self.dtype else output

    def finish_gradient_synchronization(self) -> None:
        """Nothing is left to do: the shards have their gradients after backward."""

    def whole_tensors(self, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The whole of these shards, or of their gradients, by the model's names."""
        full = {}
        for i, (path, block) in enumerate(self.blocks.items()):
            if f"shards.{i}" in own:
                whole = block.whole_tensors({"shard": own[f"shards.{i}"]})
                full |= {f"{path}{name}".removeprefix("."): t for name, t in whole.items()}
        return full

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """The whole parameters by name, on every rank; all ranks call it."""
        return self.whole_tensors(dict(self.named_parameters()))


class Prepared(NamedTuple):
    """What computes the loss, the optimizer of this rank, and the step after backward."""

    model: nn.Module
    optimizer: Optimizer
    step: Callable[[], None]


ADAM = partial(Adam, lr=0.01)


def prepare(
    stage: int,
    module: nn.Module,
    kind: Callable = ADAM,
    group: dist.ProcessGroup | None = None,
) -> Prepared:
    """A module at a stage of ZeRO; at stage 0 the gradients are averaged and all is whole.

    All start from rank 0's values, and call `step` of what is returned, not the optimizer's.
    Gradients are averaged in `step`, so clip by `clip_shards` at stages 1 to 3. `group` are
    the ranks that train the module together, all by default.
    """
    one_of("stage", stage, range(4))
    for tensor in (*module.parameters(), *module.buffers()):
        dist.broadcast(tensor.detach(), group=group, group_src=0)
    if stage == 1:
        optimizer = ShardedOptimizer(module.parameters(), kind, group=group)
        return Prepared(module, optimizer.inner, optimizer.step)
    if stage == 2:
        flat = FlatParameters(module, group)
        optimizer = kind([flat.shard])
        optimizer.zero_grad = module.zero_grad  # the shard has none before the step
        return Prepared(module, optimizer, partial(flat.step, optimizer))
    model = ShardedModel(module, group=group) if stage == 3 else module
    optimizer = kind(model.parameters())
    if stage == 0:
        optimizer.register_step_pre_hook(lambda *_: average_gradients(module, group))
    return Prepared(model, optimizer, optimizer.step)


def clip_shards(
    optimizer: Optimizer | ShardedOptimizer,
    max_norm: float,
    group: dist.ProcessGroup | None = None,
) -> RemovableHandle:
    """Before each step of this rank's optimizer clip by the norm of all ranks' gradients.

    At stages 1 to 3 the optimizers of the group have each gradient once, averaged, when they
    step. All of them are clipped alike, as `clip_grad_norm_` does in one process: a NaN makes
    all NaN. With tensor parallel the norm is that of this rank's part of each layer. At stage
    0 each rank has all gradients: use `clip_grad_norm_` there, once they are averaged, and
    never for shards, of which it sees this rank's own.
    """
    positive("max_norm", max_norm)
    if isinstance(optimizer, ShardedOptimizer):
        optimizer, group = optimizer.inner, group or optimizer.group

    def clip(optimizer: Optimizer, *_: Any) -> None:
        held = [p for options in optimizer.param_groups for p in options["params"]]
        gradients = [p.grad for p in held if p.grad is not None]
        squares = torch.zeros((), dtype=torch.float64)  # of a rank that owns nothing
        for gradient in gradients:
            squares = squares.to(gradient.device) + gradient.square().sum(dtype=torch.float64)
        dist.all_reduce(squares, group=group)
        factor = (max_norm / (squares.sqrt() + 1e-6)).clamp(max=1.0).item()  # or nan
        for gradient in gradients:
            gradient *= factor

    return optimizer.register_step_pre_hook(clip)


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole parameters by name, at any stage; all ranks call it."""
    if isinstance(model, ShardedModel):
        return model.full_parameters()
    return {name: p.detach().clone() for name, p in model.named_parameters()}
