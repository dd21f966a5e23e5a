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
from mgpu_tutorial.sharding.blocks import (
    ShardedBlock,
    blocks_in,
    fully_sharded,
    require_blocks,
)
from mgpu_tutorial.sharding.refusals import (
    own_step,
    refuse_closure,
    require_equal_shares,
    require_floating,
    require_frozen,
    require_given,
    require_loadable,
    require_member,
    require_no_batch_norm,
    require_no_closure,
    require_no_max_norm,
    require_norm,
    require_once,
    require_order,
    require_own_step,
    require_parameters,
    require_same_layout,
    require_same_order,
    require_shards_of,
    require_shared_out,
)
from mgpu_tutorial.sharding.zero import FlatParameters, Gather, owners, sharded_step
from mgpu_tutorial.shared.groups import copy_in_group
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
    require_equal_shares(24, rank, world_size)
    x = torch.randn(24, 64, generator=generator, dtype=torch.float64, device="cpu")
    mine = x.to(next(model.parameters())).chunk(world_size)[rank]
    return model(mine).square().mean()


class ShardedOptimizer:
    """Stage 1 in the form of an optimizer: `ShardedOptimizer(parameters, Adam, lr=1e-3)`.

    Takes groups too, `[{"params": [...], "lr": 0.1}, ...]`, as every optimizer does. What is
    frozen is left out, and stays so: a step refuses it once it is thawed. Before a step each
    rank has the gradients of its own samples, of which `clip_grad_norm_` would take another
    norm on each rank: clip by `clip_shards`, once they are averaged. All start from rank 0's
    values. An embedding with max_norm changes its weight in the forward, which no optimizer
    sees: leave it out. All ranks give the same parameters in the same order, which has to be
    a list's. A scheduler takes `.inner`, and on every rank the same numbers, such as the mean
    loss. `group` are the ranks that share the work, all by default.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        optimizer_class: type[Optimizer],
        *,
        group: dist.ProcessGroup | None = None,
        **kwargs: Any,
    ) -> None:
        require_member(group)
        require_order(params)
        require_no_closure(optimizer_class)
        groups = list(params)
        if not groups or not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        for options in groups:
            require_order(options["params"])
        groups = [options | {"params": list(options["params"])} for options in groups]
        given = [parameter for options in groups for parameter in options["params"]]
        require_parameters(given)
        every = [parameter for parameter in given if parameter.requires_grad]
        frozen = [i for i, parameter in enumerate(given) if not parameter.requires_grad]
        self.frozen = {f"parameter {i}": given[i] for i in frozen}
        if not every:
            raise ValueError(
                "there is no parameter to train: none was given, or all are frozen"
            )
        require_once({f"parameter {i}": parameter for i, parameter in enumerate(every)})
        require_same_order(every, group)
        self.parameters, self.group = every, group
        for parameter in every:
            dist.broadcast(parameter.data, group=group, group_src=0)
        self.owner = owners(self.parameters, dist.get_world_size(group))
        pairs = zip(self.parameters, self.owner, strict=True)
        mine = {parameter for parameter, rank in pairs if rank == dist.get_rank(group)}
        for options in groups:  # a rank may own nothing of one
            options["params"] = [p for p in options["params"] if p in mine]
        self.inner = optimizer_class(groups, **kwargs)
        self.inner.register_step_pre_hook(require_own_step)
        self.inner.zero_grad = self.zero_grad  # of what others own too

    def zero_grad(self, set_to_none: bool = True) -> None:
        """None, on every rank, for the gradients of all parameters: never zeros."""
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        require_frozen(self.frozen)
        require_given(self.inner, self.parameters)
        with own_step(self.inner):
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

    Each forward gathers, so all ranks call it, to evaluate too: rank 0 alone would wait for
    the others until the timeout of the group. All parameters are in `shards`; what is left in
    `module` is the same on every rank, but for the statistics of a BatchNorm, and so is the
    order in which the ranks use the blocks: where each rank skips another one (LayerDrop),
    they would gather different blocks as one, which nothing notices. Each rank has equally
    many samples. To freeze a block call its `requires_grad_`, not that of a layer inside. An
    optimizer that looks at rows or at a whole tensor, such as Adafactor, sees shards instead,
    and each shard has one dimension: no rule such as "decay what has two" finds one. A
    GradScaler sees the infinities of this rank's shards only, and `clip_grad_norm_` their
    norm: use `clip_shards`. A parameter that no rank uses in a step gets zeros, so weight
    decay and momentum move it, where one process leaves it alone: freeze it.

    Raises ValueError, before anything is sent, where a parameter is frozen, tied to another
    block or sharded already, where a block has several dtypes, and for a BatchNorm in
    another `compute_dtype`, whose running statistics stay in their own. Where the tensors
    of the ranks differ in name, shape or dtype, all raise it.
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
        require_member(group)
        require_floating(compute_dtype)
        if compute_dtype:
            require_no_batch_norm(
                module, f"keeps float32 and can't compute in {compute_dtype}"
            )
        units = blocks_of(module) if blocks is None else list(blocks)
        require_blocks(module, units)
        require_same_layout(module, group)
        paths = {part: f"{path}." for path, part in module.named_modules()}
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), group=group, group_src=0)
        kind = partial(ShortBlock, dtype=compute_dtype)
        self.dtype, self.group = compute_dtype, group
        self.module = fully_sharded(module, units, group, kind)
        self.blocks = {paths[block.module]: block for block in blocks_in(self.module)}
        self.shards = nn.ParameterList(block.shard for block in self.blocks.values())
        for block, shard in zip(self.blocks.values(), self.shards, strict=True):
            del block.shard
            vars(block)["shard"] = shard  # which the block uses, and no longer owns

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        output = self.module(*inputs, **keywords)
        return in_dtype(output, self.shards[0].dtype) if self.dtype else output

    def load_state_dict(
        self, state_dict: dict[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Each rank loads its own shards; a whole model is loaded before it is sharded."""
        require_loadable(state_dict, assign)
        return super().load_state_dict(state_dict, strict)

    def __deepcopy__(self, memo: dict) -> "ShardedModel":
        return copy_in_group(self, memo)

    def apply(self, fn: Callable[[nn.Module], None]) -> "ShardedModel":
        """As nn.Module's; a function that looks for a weight hears that it is too late."""
        try:
            return super().apply(fn)
        except AttributeError as error:
            raise AttributeError(
                f"{error}: the parameters of a sharded model are whole only in its forward, "
                "so initialise the module before it is sharded"
            ) from error

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

    All start from rank 0's values, and call `step` of what is returned. Not `optimizer.step`,
    which is refused at stages 1 and 2. At stages 2 and 3 an optimizer that looks at rows or
    at a whole tensor, such as Adafactor, sees shards instead. Only stage 3 takes a closure.
    Gradients are averaged in `step`, so `clip_grad_norm_` before it would clip each rank's
    own: `clip_shards` clips at stages 1 to 3. `group` are the ranks that train the module
    together, all by default.
    """
    require_member(group)
    if stage not in range(4):
        raise ValueError(
            f"there is no stage {stage}: ZeRO has 1, 2 and 3, and 0 shards nothing"
        )
    require_no_max_norm(module)
    require_no_closure(kind)
    if stage < 3:  # the third does so by itself
        require_same_layout(module, group)
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), group=group, group_src=0)
    if stage == 1:
        optimizer = ShardedOptimizer(module.parameters(), kind, group=group)
        return Prepared(module, optimizer.inner, optimizer.step)
    if stage == 2:
        flat = FlatParameters(module, group)
        optimizer = kind([flat.shard])
        optimizer.register_step_pre_hook(require_own_step)
        optimizer.zero_grad = module.zero_grad  # the shard has none before the step

        def step() -> None:
            with own_step(optimizer):
                flat.step(optimizer)

        return Prepared(module, optimizer, step)
    model = ShardedModel(module, group=group) if stage == 3 else module
    optimizer = kind(model.parameters())
    if stage == 0:
        optimizer.has_every_gradient = True  # for clip_shards
        optimizer.register_step_pre_hook(refuse_closure)
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
    require_norm(max_norm)
    require_shared_out(optimizer)
    if isinstance(optimizer, ShardedOptimizer):
        optimizer, group = optimizer.inner, group or optimizer.group
    require_shards_of(optimizer, group)

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
