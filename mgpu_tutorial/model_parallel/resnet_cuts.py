"""Where ResNet-50 can be cut, and what each cut costs: memory, work and bytes sent.

All of it follows from shapes: the network runs on PyTorch's meta device, which computes
nothing (https://docs.pytorch.org/docs/2.13/meta.html).
"""

import functools
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mgpu_tutorial.lab import Ledger, Table
from mgpu_tutorial.lab.words import bytes_text
from mgpu_tutorial.shared.vision import torchvision

BLOCKS = [3, 4, 6, 3]
UNITS = (
    *("conv1", "maxpool"),
    *(f"layer{i + 1}.{j}" for i, blocks in enumerate(BLOCKS) for j in range(blocks)),
    *("avgpool", "fc"),
)
SGD_BYTES = 12  # a parameter in training: weight, gradient and momentum, float32 each


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
    found = [nn.Sequential(model.conv1, model.bn1, model.relu), model.maxpool]
    found += [*model.layer1, *model.layer2, *model.layer3, *model.layer4]
    found += [nn.Sequential(model.avgpool, nn.Flatten(1)), model.fc]
    return dict(zip(UNITS, found, strict=True))


def cut_units(cuts: Sequence[str]) -> list[tuple[str, ...]]:
    """The names of the units of each stage: a new stage begins at each name in `cuts`."""
    check_cuts(cuts)
    ends = [0, *(UNITS.index(name) for name in cuts), len(UNITS)]
    return [UNITS[begin:end] for begin, end in pairwise(ends)]


def cut(model: nn.Module, cuts: Sequence[str]) -> list[nn.Sequential]:
    """The stages of `model`, each a row of its units."""
    found = units(model)
    return [nn.Sequential(*map(found.get, names)) for names in cut_units(cuts)]


# What it costs


class Unit(NamedTuple):
    """What one unit of the network needs for one batch.

    `shape` is that of its output, `flops` counts the operations of its forward, `saved` has
    the bytes of each storage that autograd keeps for its backward.
    """

    name: str
    shape: list[int]
    parameters: int
    flops: int
    saved: Mapping[object, int]

    @property
    def output_bytes(self) -> int:
        """What a cut behind this unit sends, in each direction; float32."""
        return 4 * math.prod(self.shape)


class StageCost(NamedTuple):
    """What one stage needs: `parameters` and `flops` are counted, the others are bytes."""

    parameters: int
    activation_bytes: int
    flops: int
    output_bytes: int

    @property
    def memory(self) -> int:
        """Bytes in training, with SGD and momentum."""
        return SGD_BYTES * self.parameters + self.activation_bytes


def measure(batch: int = 4, image_size: int = 64) -> tuple[Unit, ...]:
    """The units of ResNet-50 for a batch of square images, in the order of its forward."""
    return _measured(batch, image_size)  # the cache tells measure(4) from measure(batch=4)


@functools.cache
def _measured(batch: int, image_size: int) -> tuple[Unit, ...]:
    with torch.device("meta"):
        model = torchvision.models.resnet50()
        x = torch.empty(batch, 3, image_size, image_size)
    found = []
    for name, unit in units(model).items():
        ledger = Ledger()
        with ledger.saved_for_backward(unit), FlopCounterMode(display=False) as flops:
            x = unit(x)
        parameters = sum(p.numel() for p in unit.parameters())
        saved = ledger.storages("activations")
        found.append(Unit(name, list(x.shape), parameters, flops.get_total_flops(), saved))
        x = x.detach().requires_grad_()
    return tuple(found)


def stage_shapes(cuts: Sequence[str], batch: int, image_size: int) -> list[list[int]]:
    """The shapes between the stages, from the images to the result."""
    outputs = [unit.shape for unit in measure(batch, image_size)]
    shapes = [[batch, 3, image_size, image_size], *outputs]
    return [shapes[i] for i in (0, *(UNITS.index(name) for name in cuts), -1)]


def stage_costs(measured: Sequence[Unit], cuts: Sequence[str]) -> list[StageCost]:
    """What each stage needs, if a new one begins at each unit that `cuts` names.

    A stage's input counts as its own: on another device it is a copy.
    """
    found = []
    for names in cut_units(cuts):
        mine = [unit for unit in measured if unit.name in names]
        saved = {key: nbytes for unit in mine for key, nbytes in unit.saved.items()}
        found.append(
            StageCost(
                parameters=sum(unit.parameters for unit in mine),
                activation_bytes=sum(saved.values()),
                flops=sum(unit.flops for unit in mine),
                output_bytes=mine[-1].output_bytes,
            )
        )
    return found


def most_work(measured: Sequence[Unit], cuts: Sequence[str]) -> float:
    """The share of all work that the busiest stage has."""
    work = [stage.flops for stage in stage_costs(measured, cuts)]
    return max(work) / sum(work)


def best_cuts(measured: Sequence[Unit]) -> dict[str, str]:
    """The best single cut for each aim: the smallest worst device, or the fewest bytes."""
    pairs = {name: stage_costs(measured, [name]) for name in UNITS[1:]}
    return {
        "memory": min(pairs, key=lambda name: max(stage.memory for stage in pairs[name])),
        "balance": min(pairs, key=lambda name: max(stage.flops for stage in pairs[name])),
        "traffic": min(pairs, key=lambda name: pairs[name][0].output_bytes),
    }


def cut_table(measured: Sequence[Unit]) -> Table:
    """A row for each possible cut into two: parameters, activations, work, bytes sent."""
    rows = []
    for name in UNITS[1:]:
        pair = first, second = stage_costs(measured, [name])
        rows.append(
            [
                name,
                *(f"{stage.parameters / 1e6:.1f} M" for stage in pair),
                *(bytes_text(stage.activation_bytes) for stage in pair),
                bytes_text(max(first.memory, second.memory)),
                f"{first.flops / (first.flops + second.flops):.0%}",
                bytes_text(first.output_bytes),
            ]
        )
    header = ["cut before", "parameters 0", "1", "activations 0", "1"]
    header += ["fuller device", "work 0", "sends"]
    return Table(header, rows)
