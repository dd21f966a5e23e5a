"""What the stages of ZeRO can't do, refused before a rank sends anything."""

from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint

from mgpu_tutorial.shared.groups import order_of, require_dense, require_same, require_whole
from mgpu_tutorial.shared.parameters import fingerprint_of

BATCH_NORMS = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm


def require_member(group: dist.ProcessGroup | None) -> None:
    """ValueError on a rank that is not in the group."""
    if dist.get_rank(group) < 0:
        raise ValueError(
            "this rank is not in the group over which it is to shard: give each rank the "
            "group in which it is, such as mesh['dp'].get_group()"
        )


def require_one_dtype(tensors: list[torch.Tensor]) -> None:
    """ValueError where there is no tensor to put into a flat one, or several dtypes."""
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    if not dtypes:
        raise ValueError(
            "there are no parameters to shard: give a module that has some, each module once"
        )
    if len(dtypes) > 1:
        raise ValueError(
            f"parameters of {' and '.join(dtypes)} don't fit into one flat tensor: convert "
            "the module to one dtype first"
        )


def require_once(named: Mapping[str, nn.Parameter]) -> None:
    """ValueError where a parameter has two names, or was sharded before."""
    seen = set()
    require_values(named)
    for name, parameter in named.items():
        if parameter in seen or hasattr(parameter, "sharded"):
            raise ValueError(
                f"`{name}` is tied to another layer or sharded already, and its copies would "
                "go apart: shard a weight once, and tied ones by PyTorch's fully_shard"
            )
        seen.add(parameter)


def require_values(named: Mapping[str, nn.Parameter]) -> None:
    """ValueError where a lazy layer has no shape yet."""
    for name, parameter in named.items():
        if is_lazy(parameter):
            raise ValueError(
                f"`{name}` has no shape before its lazy layer has seen a batch: run one "
                "through the module first, then shard it"
            )


def require_same_start(
    named: Mapping[str, nn.Parameter], group: dist.ProcessGroup | None = None
) -> None:
    """As `require_once`, and ValueError on every rank where ranks begin with other values."""
    require_once(named)
    layout = [(n, order_of(p), str(p.dtype), fingerprint_of([p])) for n, p in named.items()]
    what = "name, shape, dtype and values, of one seed or file,"
    require_same(what, layout, group)


def require_same_layout(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """ValueError on every rank where ranks have other parameters or buffers."""
    require_whole(module.named_parameters(), group)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    layout = [(name, order_of(t), str(t.dtype), t.requires_grad) for name, t in tensors]
    require_same("name, shape, dtype and requires_grad of each tensor", layout, group)
    require_dense(tensors)


def require_same_order(
    parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None
) -> None:
    """ValueError on every rank where ranks list other parameters, or the same in other order.

    Parameters have no names. Ranks with the same values list them in the same order, and
    values that none of the others has come from another seed: rank 0's will replace them.
    """
    require_whole(((f"parameter {i}", p) for i, p in enumerate(parameters)), group)
    require_same("shape and dtype", [(order_of(p), str(p.dtype)) for p in parameters], group)
    require_dense((f"parameter {i}", p) for i, p in enumerate(parameters))
    if dist.get_backend(group) == "fake":
        return
    mine = [fingerprint_of([parameter]) for parameter in parameters]
    everywhere = [mine] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, mine, group=group)
    for rank, theirs in enumerate(everywhere):
        if theirs != everywhere[0] and sorted(theirs) == sorted(everywhere[0]):
            raise ValueError(
                f"rank {rank} of the group lists the parameters of rank 0 in another order, "
                "and would get the wrong ones: give them in the order of model.parameters()"
            )


def require_order(params: Iterable) -> None:
    """TypeError for a parameter alone, and a set, whose order is another on each rank."""
    if isinstance(params, torch.Tensor):
        raise TypeError(
            "one parameter alone, of which rows would be taken: give a list, [it]"
        )
    if isinstance(params, set | frozenset):
        raise TypeError(
            "a set of parameters has another order on each rank: give a list, or "
            "model.parameters()"
        )


def require_parameters(given: list) -> None:
    """TypeError for what is no parameter, such as a pair of a name and one."""
    kinds = {type(each).__name__ for each in given if not isinstance(each, torch.Tensor)}
    if kinds:
        raise TypeError(
            f"expected parameters, got {' and '.join(sorted(kinds))}: give a list of them, "
            "such as model.parameters()"
        )


def require_loadable(state: Mapping[str, Any], assign: bool) -> None:
    """ValueError for a state that would leave a ShardedModel as it was."""
    if assign:
        raise ValueError(
            "assign=True would replace shards that the blocks still hold: load with "
            "assign=False, which copies into them"
        )
    if not any(name.startswith("shards.") for name in state):
        raise ValueError(
            f"a state of {', '.join([*state][:3]) or 'nothing'} has no shards, so nothing "
            "would be loaded: load a whole model before it is sharded"
        )


def require_norm(max_norm: float) -> None:
    """ValueError unless it is a length by which gradients can be clipped."""
    if not isinstance(max_norm, int | float) or not max_norm > 0:  # nan is not
        raise ValueError(f"max_norm is {max_norm!r}: give the longest norm, a number above 0")


def require_shared_out(optimizer: Any) -> None:
    """ValueError for the optimizer of stage 0, whose gradients all ranks would count."""
    if hasattr(optimizer, "has_every_gradient"):
        raise ValueError(
            "at stage 0 each rank has all gradients, which would count once for each rank: "
            "average them, and clip by clip_grad_norm_"
        )


@contextmanager
def own_step(optimizer: Optimizer) -> Iterator[None]:
    """Inside, and nowhere else, an optimizer with the hook `require_own_step` may step."""
    optimizer.in_own_step = True
    try:
        yield
    finally:
        optimizer.in_own_step = False


def require_own_step(optimizer: Optimizer, *_: Any) -> None:
    """RuntimeError where the inner optimizer of stage 1 or 2 is stepped by itself."""
    if not getattr(optimizer, "in_own_step", False):
        raise RuntimeError(
            "this optimizer has only this rank's part, whose gradients are not averaged yet: "
            "call the `step` of prepare or of ShardedOptimizer instead, which averages, "
            "steps and sends"
        )


def require_no_max_norm(module: nn.Module) -> None:
    """ValueError where an embedding changes its own weight in the forward."""
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise ValueError(
                "an embedding with max_norm changes its weight in the forward, on each rank "
                "by other tokens, and no shard would learn it: make it without max_norm"
            )


def require_floating(dtype: torch.dtype | None) -> None:
    """ValueError where a module is to compute in a dtype that has no fractions."""
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise ValueError(
            f"a module can't compute in {dtype!r}, for weights have fractions: give a "
            "floating dtype, such as torch.bfloat16"
        )


def require_block(
    module: nn.Module, places: Mapping[str, nn.Parameter], taken: Container[nn.Parameter] = ()
) -> None:
    """ValueError where one flat shard can't stand for the parameters at these places."""
    require_no_max_norm(module)
    require_values(places)
    held = set(places.values())
    for part in module.modules():
        replaced = getattr(vars(part).get("forward"), "func", None)
        if replaced is checkpoint and not held.isdisjoint(part.parameters()):
            raise ValueError(
                f"{type(part).__name__} is recomputed already, and would look in backward "
                "for parameters that are gone: shard first, then recompute the block"
            )
    for name, parameter in places.items():
        if parameter in taken or hasattr(parameter, "sharded"):
            raise ValueError(
                f"`{name}` is tied to another block or sharded already, and its copies would "
                "go apart: put both layers into one block, or leave both to the root"
            )
    require_one_dtype(list(places.values()))
    frozen = [name for name, parameter in places.items() if not parameter.requires_grad]
    if frozen:
        raise ValueError(
            f"`{frozen[0]}` is frozen, and as a part of the block's shard it would train: "
            "train it too, or use PyTorch's fully_shard, which cuts each parameter by itself"
        )


def require_in_forward(name: str, places: Iterable[str]) -> None:
    """AttributeError where a sharded parameter is read from outside of its block."""
    if any(name == place.rpartition(".")[2] for place in places):
        raise AttributeError(
            f"`{name}` is whole only inside this block's own forward: make the module "
            "that reads it the block, or leave the layer to the root"
        )


def require_owners(parameters: list[nn.Parameter], owner: list[int], world_size: int) -> None:
    """ValueError where a parameter has no owner, or stands in the list twice."""
    if len(owner) != len(parameters) or any(rank not in range(world_size) for rank in owner):
        raise ValueError(
            f"{len(parameters)} parameters need as many owners, each a rank from 0 to "
            f"{world_size - 1}, and not {len(owner)} of {sorted(set(owner))}"
        )
    if len(set(parameters)) < len(parameters):
        raise ValueError("a parameter stands in the list twice, and would be averaged twice")


def require_step(
    named: Mapping[str, nn.Parameter], optimizer: Optimizer, stepped: Iterable[nn.Parameter]
) -> None:
    """An error where a step would leave a gradient out, or a parameter that it must move."""
    stepped = list(stepped)
    missing = [name for name, parameter in named.items() if parameter.grad is None]
    if missing:
        raise RuntimeError(
            f"no gradient in {', '.join(missing[:3])}: every rank sends each, so backward "
            "comes first, and what no loss uses is frozen before"
        )
    if any(getattr(parameter.grad, "averaged", False) for parameter in named.values()):
        raise RuntimeError(
            "gradients of the last step are still there, averaged, and backward would add to "
            "them: set them to None by zero_grad() before each backward"
        )
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if not held.issuperset(stepped):
        raise ValueError(
            "the optimizer lacks what this rank must step, so nothing would move: give it "
            "this rank's own part, after the sharding"
        )
    for parameter in stepped:
        if hasattr(parameter, "is_due"):
            parameter.is_due = True


def require_shards_of(optimizer: Optimizer, group: dist.ProcessGroup | None) -> None:
    """ValueError unless what the optimizer steps are shards over as many ranks as `group`."""
    ranks = dist.get_world_size(group)
    for parameter in (p for options in optimizer.param_groups for p in options["params"]):
        if getattr(parameter, "sharded", ranks) not in (0, True, ranks):
            raise ValueError(
                f"shards over {parameter.sharded} ranks and a group of {ranks}, which would "
                "count gradients twice or not at all: give the group of the shards"
            )


def require_no_closure(kind: Any) -> None:
    """ValueError for an optimizer that calls forward and backward itself, as LBFGS does."""
    kind = getattr(kind, "func", kind)  # of a partial
    if kind is LBFGS or isinstance(kind, LBFGS):
        raise ValueError(
            "LBFGS computes gradients inside its step, of this rank's samples, and searches "
            "along all parameters at once: take an optimizer that steps each number alone"
        )


def refuse_closure(optimizer: Optimizer, args: tuple, keywords: Mapping[str, Any]) -> None:
    """ValueError before a step with a closure, whose gradients nobody would average."""
    if any(given is not None for given in (*args[1:], *keywords.values())):
        raise ValueError(
            "a closure would compute gradients that nobody averages: go backward first, then "
            "call step() without one"
        )


def require_frozen(named: Mapping[str, nn.Parameter]) -> None:
    """RuntimeError where one of these, which were left out, is trained now."""
    for name, parameter in named.items():
        if parameter.requires_grad:
            raise RuntimeError(
                f"`{name}` was frozen, or not there, when the others were sharded, and is "
                "trained now, so no step would move it: thaw and add first, then shard"
            )


def require_given(optimizer: Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """RuntimeError where an inner optimizer was given more than those that ranks average."""
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    if more := len(held.difference(parameters)):
        raise RuntimeError(
            f"{more} parameters were added to the inner optimizer, whose gradients nobody "
            "averages: give all parameters to ShardedOptimizer when it is made"
        )


def require_no_more(module: nn.Module, named: Mapping[str, nn.Parameter]) -> None:
    """RuntimeError where a parameter is trained that was frozen, or not there, before."""
    known = set(named.values())
    require_frozen({n: p for n, p in module.named_parameters() if p not in known})


def require_in_flat(
    module: nn.Module, named: Mapping[str, nn.Parameter], flat: torch.Tensor
) -> None:
    """RuntimeError where a trained parameter is no view of the flat tensor, or no longer."""
    require_no_more(module, named)
    memory = flat.untyped_storage()
    for name, parameter in named.items():
        if parameter.untyped_storage() is not memory:
            raise RuntimeError(
                f"`{name}` has left the flat tensor, so no step would move it: convert or "
                "move the module before FlatParameters"
            )


def require_unmoved(shard: nn.Parameter, version: int) -> None:
    """RuntimeError where a shard was stepped after the forward whose backward asks for it."""
    if shard._version != version:
        raise RuntimeError(
            "the shard was changed between forward and backward, which would now take other "
            "weights: go backward first, then step"
        )


def require_averaged(optimizer: Optimizer, *_: Any) -> None:
    """RuntimeError before a step that takes mean gradients of shards, and this rank's own.

    Also before one of parameters that a block has taken out, which would move nothing, and
    before one of a flat shard that does not come from its FlatParameters.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(not getattr(p, "is_due", True) for p in parameters):
        raise RuntimeError(
            "a step of a flat shard by itself, whose gradients nobody has averaged: call the "
            "`step` of the FlatParameters, or of the ShardedOptimizer, that holds it"
        )
    if any(getattr(p, "sharded", 1) is True and p.grad is not None for p in parameters):
        raise RuntimeError(
            "this optimizer has parameters that are views of a flat one, with gradients of "
            "this rank alone: make it of the FlatParameters' shard"
        )
    for parameter in parameters:
        if hasattr(parameter, "is_due"):
            parameter.is_due = False
    if all(getattr(p, "sharded", 1) == 1 for p in parameters):
        return  # no shards, or each is the whole of a group of one rank
    require_no_closure(optimizer)
    if any(getattr(p, "sharded", 1) == 0 for p in parameters):
        raise RuntimeError(
            "this optimizer was made before its model was sharded, and holds parameters that "
            "have been taken out: make it anew from the sharded model's parameters()"
        )
    for parameter in parameters:
        averaged = hasattr(parameter, "sharded") or hasattr(parameter, "awaits_mean")
        if parameter.grad is not None and not averaged:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} is in no block, beside "
                "shards, and nobody averages its gradient: leave it to the root by "
                "fully_sharded, or average it yourself, with an optimizer of its own"
            )


@cache
def watch_steps() -> None:
    """From now on each optimizer's step passes `require_averaged`."""
    register_optimizer_step_pre_hook(require_averaged)


def mark(
    shard: nn.Parameter, group: dist.ProcessGroup | None = None, *, flat: bool = False
) -> None:
    """Note over how many ranks it is a shard; a step refuses what nobody averages beside.

    A `flat` one moves only in a step that `require_step` has let through.
    """
    shard.sharded = dist.get_world_size(group)
    if flat:
        shard.is_due = False
    watch_steps()


def require_no_graph(operator: str) -> None:
    """RuntimeError where backward is to be differentiated: what is sent leaves no graph."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"a second derivative through {operator} is not computed: leave out "
            "create_graph=True, or take it from a model that is whole, on one rank"
        )


def require_no_batch_norm(module: nn.Module, why: str) -> None:
    """ValueError where a module has a BatchNorm."""
    if any(isinstance(part, BATCH_NORMS) for part in module.modules()):
        raise ValueError(f"a BatchNorm {why}: use another norm, such as GroupNorm")


def require_no_spectral_norm(module: nn.Module) -> None:
    """ValueError where each forward changes what the next one computes with."""
    kinds = (type(part).__name__ for part in module.modules())
    names = (name for name, _ in module.named_buffers())  # of the older one: weight_u
    if "_SpectralNorm" in kinds or any(name.endswith("weight_u") for name in names):
        raise ValueError(
            "a spectral norm takes a step in each forward, so the second would compute with "
            "another weight: leave that block out"
        )


def require_equal_shares(samples: int, rank: int, world_size: int) -> None:
    """ValueError where a batch has no equal part for this rank."""
    if world_size < 1 or samples % world_size:
        raise ValueError(
            f"{samples} samples can't be cut into {world_size} equal parts, and the mean of "
            "unequal parts is not the mean of the batch"
        )
    if rank not in range(world_size):
        raise ValueError(f"there is no rank {rank} of {world_size}")
