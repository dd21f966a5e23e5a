"""What is sharded: a module that all ranks have alike, in units that travel together."""

from collections.abc import Iterable, Iterator

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.wrappers import NaiveDDP
from mgpu_tutorial.lab import borrowed
from mgpu_tutorial.shared.parameters import require_same


class Sharded(nn.Module):
    """A wrapper around `module`, to which rank 0 sends its parameters and buffers once.

    Raises ValueError on every rank where the ranks' modules differ, where no parameter is to
    be trained, and where a wrapper is at work inside already.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        require_same_parameters(module)  # first, so that all ranks come to the same error
        require_no_wrapper(module)
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)
        self.module = module


borrowed.refuse_ddp(
    Sharded,
    "a sharded module averages its gradients by itself, and its ranks have different shards, "
    "which DDP would overwrite: wrap a module once",
)


def require_no_wrapper(module: nn.Module) -> None:
    """ValueError where a module is wrapped already, or a part of it."""
    for name, part in module.named_modules():
        if isinstance(part, (Sharded, NaiveDDP, DistributedDataParallel)):
            where = f" at {name!r}" if name else ""
            raise ValueError(
                f"there is a {type(part).__name__} inside{where}: wrap a module once"
            )


def require_same_parameters(module: nn.Module) -> None:
    """The ranks compare name, shape and dtype of each parameter, and which are trained.

    Raises ValueError, on every rank alike, where they differ or none requires a gradient.
    """
    mine = [
        (name, list(p.shape), str(p.dtype), p.requires_grad)
        for name, p in module.named_parameters()
    ]
    require_same(mine, "parameters", "build the same module on every rank")
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError("no parameter requires a gradient: there is nothing to synchronise")


# Units


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The units of a module if nobody names them: its blocks, and itself for what is left.

    Blocks are what stands in a ModuleList, a ModuleDict or a Sequential.
    """
    containers = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

    def inside(parent: nn.Module) -> Iterator[nn.Module]:
        for child in parent.children():
            if isinstance(child, containers):
                yield from inside(child)
            elif isinstance(parent, containers):
                yield child
            else:
                yield from inside(child)

    return [*dict.fromkeys(inside(module)), module]


def owners(module: nn.Module, units: list[nn.Module]) -> dict[nn.Module, list[nn.Parameter]]:
    """The parameters of each unit: a parameter belongs to the innermost unit around it.

    A parameter that two units share belongs to an enclosing unit that contains both, or is
    not sharded.
    """
    inside = {unit: set(unit.parameters()) for unit in units}
    innermost_first = sorted(units, key=lambda unit: len(list(unit.modules())))
    mine: dict[nn.Module, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        having = [unit for unit in innermost_first if parameter in inside[unit]]
        for unit in having:
            if all(_one_around_the_other(unit, other) for other in having):
                mine.setdefault(unit, []).append(parameter)
                break
    return mine


def _one_around_the_other(unit: nn.Module, other: nn.Module) -> bool:
    return other in set(unit.modules()) or unit in set(other.modules())


def outermost(units: Iterable[nn.Module]) -> set[nn.Module]:
    """The units that are inside no other one."""
    units = set(units)
    inner = {part for unit in units for part in unit.modules() if part is not unit}
    return units - inner


def alike(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group the parameters by what one tensor can hold: one dtype, trained or frozen."""
    groups: dict[tuple, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dtype, parameter.requires_grad), []).append(parameter)
    return list(groups.values())


def places_of(
    unit: nn.Module, parameters: list[nn.Parameter]
) -> Iterator[tuple[nn.Module, str, int]]:
    """Module, name and index of each parameter in a unit; a tied one has several places."""
    index = {p: i for i, p in enumerate(parameters)}
    for module in unit.modules():
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        for name, parameter in list(own):
            if parameter in index:
                yield module, name, index[parameter]
