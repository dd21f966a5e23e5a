"""Which parameters travel together: the units of a module, and what belongs to each."""

from collections.abc import Iterable, Iterator

from torch import nn


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
