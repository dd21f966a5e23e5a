"""Where ResNet-50 can be cut: its 20 units, and the stages that a choice of cuts makes."""

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

UNITS = (
    *("conv1", "maxpool"),
    *(f"layer{i}.{j}" for i, blocks in enumerate([3, 4, 6, 3], 1) for j in range(blocks)),
    *("avgpool", "fc"),
)


def cut(model: nn.Module, cuts: Sequence[str], places: Sequence) -> list[nn.Sequential]:
    """The stages of ResNet-50, one for each of `places`: devices, or ranks.

    A stage begins at each unit in `cuts`. Raises ValueError where the numbers do not fit.
    """
    if isinstance(places, str) or len(places) != len(cuts) + 1:
        raise ValueError(
            f"the cuts {list(cuts)} make {len(cuts) + 1} stages, and each needs a device "
            f"or a rank; got {places!r}. A device may be named twice: "
            '("cuda:0", "cuda:0").'
        )
    modules = units(model)
    return [nn.Sequential(*map(modules.get, names)) for names in cut_units(cuts)]


def units(model: nn.Module) -> dict[str, nn.Module]:
    """The parts between which ResNet-50 can be cut, in the order of its forward.

    Inside a residual block a cut would have to send two tensors, so a block is one unit.
    """
    modules = [nn.Sequential(model.conv1, model.bn1, model.relu), model.maxpool]
    modules += [*model.layer1, *model.layer2, *model.layer3, *model.layer4]
    modules += [nn.Sequential(model.avgpool, nn.Flatten(1)), model.fc]
    return dict(zip(UNITS, modules, strict=True))


def cut_units(cuts: Sequence[str]) -> list[tuple[str, ...]]:
    """The names of the units of each stage; ValueError where `cuts` are none in order."""
    if isinstance(cuts, str) or any(name not in UNITS[1:] for name in cuts):
        raise ValueError(f"cuts must be a list of {', '.join(UNITS[1:])}; got {cuts!r}")
    places = [UNITS.index(name) for name in cuts]
    if places != sorted(set(places)):
        raise ValueError(f"cuts must follow the order of the network, got {list(cuts)}")
    return [UNITS[begin:end] for begin, end in pairwise([0, *places, len(UNITS)])]
