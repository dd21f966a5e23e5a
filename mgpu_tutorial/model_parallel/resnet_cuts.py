"""Where ResNet-50 can be cut: its 20 units, and the stages that a choice of cuts makes."""

import functools
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn

from mgpu_tutorial.shared.vision import torchvision

BLOCKS = [3, 4, 6, 3]
UNITS = (
    *("conv1", "maxpool"),
    *(f"layer{i + 1}.{j}" for i, blocks in enumerate(BLOCKS) for j in range(blocks)),
    *("avgpool", "fc"),
)


def check_cuts(cuts: Sequence[str], devices: Sequence | None = None) -> None:
    """ValueError where `cuts` are no units in their order, or do not fit the devices."""
    if isinstance(cuts, str) or any(name not in UNITS[1:] for name in cuts):
        raise ValueError(f"cuts must be a list of {', '.join(UNITS[1:])}; got {cuts!r}")
    positions = [UNITS.index(name) for name in cuts]
    if positions != sorted(set(positions)):
        raise ValueError(f"cuts must follow the order of the network, got {list(cuts)}")
    if devices is None:
        return
    if isinstance(devices, str) or len(devices) < 2 or len(devices) != len(cuts) + 1:
        raise ValueError(
            f"{len(cuts)} cut(s) make {len(cuts) + 1} stages, and each needs a device or a "
            f"rank, at least two in all; got {devices!r}. A device may be named twice: "
            '("cuda:0", "cuda:0").'
        )


def units(model: nn.Module) -> dict[str, nn.Module]:
    """The parts between which ResNet-50 can be cut, in the order of its forward.

    Inside a residual block a cut would have to send two tensors, so a block is one unit.
    """
    modules = [nn.Sequential(model.conv1, model.bn1, model.relu), model.maxpool]
    modules += [*model.layer1, *model.layer2, *model.layer3, *model.layer4]
    modules += [nn.Sequential(model.avgpool, nn.Flatten(1)), model.fc]
    return dict(zip(UNITS, modules, strict=True))


def cut_units(cuts: Sequence[str]) -> list[tuple[str, ...]]:
    """The names of the units of each stage: a new stage begins at each name in `cuts`."""
    check_cuts(cuts)
    ends = [0, *(UNITS.index(name) for name in cuts), len(UNITS)]
    return [UNITS[begin:end] for begin, end in pairwise(ends)]


def cut(model: nn.Module, cuts: Sequence[str]) -> list[nn.Sequential]:
    """The stages of `model`, each a row of its units."""
    modules = units(model)
    return [nn.Sequential(*map(modules.get, names)) for names in cut_units(cuts)]


def stage_shapes(cuts: Sequence[str], batch: int, image_size: int) -> list[list[int]]:
    """The shapes between the stages, from the images to the result."""
    shapes = unit_shapes(batch, image_size)
    return [shapes[i] for i in (0, *(UNITS.index(name) for name in cuts), -1)]


@functools.cache
def unit_shapes(batch: int, image_size: int) -> tuple[list[int], ...]:
    """The shape of the images, and then of each unit's output."""
    with torch.device("meta"), torch.no_grad():
        model = torchvision.models.resnet50(norm_layer=nn.Identity)  # which keeps shapes too
        outputs = [torch.empty(batch, 3, image_size, image_size)]
        for unit in units(model).values():
            outputs.append(unit(outputs[-1]))
    return tuple(list(x.shape) for x in outputs)
