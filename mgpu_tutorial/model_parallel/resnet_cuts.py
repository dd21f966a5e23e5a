"""Where ResNet-50 can be cut, and what each cut costs: memory, work and bytes sent.

All of it follows from shapes: the network runs on PyTorch's meta device, which computes
nothing (https://docs.pytorch.org/docs/2.13/meta.html).
"""

import functools
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.flop_counter import FlopCounterMode

from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.draw.drawing import FAINT, INK, Drawing
from mgpu_tutorial.lab.draw.sequence_chart import bytes_text
from mgpu_tutorial.lab.record.report import colour
from mgpu_tutorial.shared.vision import torchvision

BLOCKS = [3, 4, 6, 3]
UNITS = (
    *("conv1", "maxpool"),
    *(f"layer{i + 1}.{j}" for i, blocks in enumerate(BLOCKS) for j in range(blocks)),
    *("avgpool", "fc"),
)
PER_PARAMETER = 12  # bytes in training: weight, gradient and SGD's momentum, float32 each
LEFT, COLUMN, RIGHT, ROW, TOP = 110, 38, 190, 84, 34


def check_cuts(cuts: Sequence[str], devices: Sequence | None = None) -> None:
    """ValueError where `cuts` are no units in their order, or do not fit the devices."""
    if isinstance(cuts, str) or any(name not in UNITS[1:] for name in cuts):
        raise ValueError(f"cuts must be a list of {', '.join(UNITS[1:])}; got {cuts!r}")
    places = [UNITS.index(name) for name in cuts]
    if places != sorted(set(places)):
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
    places = [0, *(UNITS.index(name) for name in cuts), len(UNITS)]
    return [UNITS[begin:end] for begin, end in pairwise(places)]


def cut(model: nn.Module, cuts: Sequence[str]) -> list[nn.Sequential]:
    """The stages of `model`, each a row of its units."""
    found = units(model)
    return [nn.Sequential(*map(found.get, names)) for names in cut_units(cuts)]


def stage_shapes(cuts: Sequence[str], batch: int, image_size: int) -> list[list[int]]:
    """The shapes between the stages, from the images to the result."""
    shapes = [[batch, 3, image_size, image_size]]
    for unit in UNITS:
        channels, side = shapes[-1][1], shapes[-1][-1]
        layer, _, block = unit.partition(".")
        if unit in ("conv1", "maxpool", "layer2.0", "layer3.0", "layer4.0"):
            side = (side + 1) // 2  # these have a stride of two
        channels = {"conv1": 64, "layer1": 256, "fc": 1000}.get(layer, channels)
        channels *= 2 if block == "0" and layer != "layer1" else 1
        flat = unit in ("avgpool", "fc")
        shapes.append([batch, channels] if flat else [batch, channels, side, side])
    return [shapes[i] for i in (0, *(UNITS.index(name) for name in cuts), -1)]


# What it costs


class Unit(NamedTuple):
    """What one unit of the network needs for one batch.

    `sends` are the bytes of its output, `flops` the operations of its forward, `saved` the
    bytes of each storage that autograd keeps for its backward.
    """

    name: str
    parameters: int
    sends: int
    flops: int
    saved: dict[StorageWeakRef, int]


class Weight(NamedTuple):
    """What one stage needs: `parameters` are counted, `kept` and `sends` are bytes."""

    parameters: int
    kept: int
    flops: int
    sends: int

    @property
    def memory(self) -> int:
        """Bytes in training, with SGD and momentum."""
        return PER_PARAMETER * self.parameters + self.kept


def measure(batch: int = 4, image_size: int = 64) -> tuple[Unit, ...]:
    """The units of ResNet-50 for a batch of square images, in the order of its forward."""
    return _measured(batch, image_size)  # the cache tells measure(4) from measure(batch=4)


@functools.cache
def _measured(batch: int, image_size: int) -> tuple[Unit, ...]:
    with torch.device("meta"):
        model = torchvision.models.resnet50()
        x = torch.empty(batch, 3, image_size, image_size)
    found = []
    for name, module in units(model).items():
        own = {StorageWeakRef(t.untyped_storage()) for t in module.state_dict().values()}
        saved: dict[StorageWeakRef, int] = {}

        def keep(tensor: torch.Tensor, saved=saved) -> torch.Tensor:
            storage = tensor.untyped_storage()
            saved[StorageWeakRef(storage)] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda t: t), FlopCounterMode(display=False) as flops:
            x = module(x)
        saved = {key: nbytes for key, nbytes in saved.items() if key not in own}
        count = sum(p.numel() for p in module.parameters())
        sends = x.numel() * x.element_size()
        found.append(Unit(name, count, sends, flops.get_total_flops(), saved))
        x = x.detach().requires_grad_()
    return tuple(found)


def weigh(measured: Sequence[Unit], cuts: Sequence[str]) -> list[Weight]:
    """What each stage needs, if a new one begins at each unit that `cuts` names.

    A stage's input counts as its own: on another device it is a copy.
    """
    found = []
    for names in cut_units(cuts):
        mine = [unit for unit in measured if unit.name in names]
        kept = {key: nbytes for unit in mine for key, nbytes in unit.saved.items()}
        parameters, flops = sum(u.parameters for u in mine), sum(u.flops for u in mine)
        found.append(Weight(parameters, sum(kept.values()), flops, mine[-1].sends))
    return found


def most_work(measured: Sequence[Unit], cuts: Sequence[str]) -> float:
    """The share of all work that the busiest stage has."""
    work = [stage.flops for stage in weigh(measured, cuts)]
    return max(work) / sum(work)


def best_cuts(measured: Sequence[Unit]) -> dict[str, str]:
    """The best single cut for each aim: the smallest worst device, or the fewest bytes."""
    pairs = {name: weigh(measured, [name]) for name in UNITS[1:]}
    return {
        "memory": min(pairs, key=lambda name: max(w.memory for w in pairs[name])),
        "balance": min(pairs, key=lambda name: max(w.flops for w in pairs[name])),
        "traffic": min(pairs, key=lambda name: pairs[name][0].sends),
    }


def cut_table(measured: Sequence[Unit]) -> Table:
    """A row for each possible cut into two: parameters, activations, work, bytes sent."""
    rows = []
    for name in UNITS[1:]:
        first, second = weigh(measured, [name])
        share = first.flops / (first.flops + second.flops)
        row = [f"{w.parameters / 1e6:.1f} M" for w in (first, second)]
        row += [bytes_text(w.kept) for w in (first, second)]
        fuller = bytes_text(max(first.memory, second.memory))
        rows.append([name, *row, fuller, f"{share:.0%}", bytes_text(first.sends)])
    header = ["cut before", "parameters 0", "1", "activations 0", "1"]
    header += ["fuller device", "work 0", "sends"]
    return Table(header, rows)


def cut_picture(measured: Sequence[Unit], cuts: Sequence[str]) -> Drawing:
    """Draw parameters, activations, work and bytes sent, unit by unit, a colour a device."""
    stages, places = weigh(measured, cuts), [UNITS.index(name) for name in cuts]
    height = TOP + 4 * ROW + 40
    alt = f"ResNet-50 cut before {', '.join(cuts)}"
    drawing = Drawing(LEFT + COLUMN * len(UNITS) + RIGHT, height, _text(stages, cuts), alt)
    _profile(drawing, 0, "parameters", [u.parameters for u in measured], places)
    _profile(drawing, 1, "activations", _first_kept(measured), places)
    _profile(drawing, 2, "work", [u.flops for u in measured], places)
    _profile(drawing, 3, "sends", [u.sends for u in measured[:-1]], places, shift=0.5)
    for row, totals in enumerate(zip(*map(_said, stages), strict=True)):
        for s, total in enumerate(totals[: len(totals) - (row == 3)]):
            y = TOP + ROW * (row + 1) - 18 - 16 * (len(totals) - 1 - s)
            text = f"{total} sent" if row == 3 else f"device {s}: {total}"
            drawing.label(LEFT + COLUMN * 20 + 14, y, text, 13, colour(s), "start", "bold")
    for place in places:
        x = LEFT + COLUMN * place
        drawing.line(x, TOP - 14, x, height - 40, INK, 2.5, "7 4")
        drawing.label(x, TOP - 20, "cut", 13, weight="bold")
    _axis(drawing, height)
    return drawing


def _profile(
    drawing: Drawing, row: int, name: str, values: Sequence[int], places: list[int], shift=0.0
) -> None:
    """One row of bars; with `shift` they stand between the units, filled at a cut."""
    base = TOP + ROW * (row + 1) - 12
    drawing.label(LEFT - 12, base - 24, name, 14, anchor="end", weight="bold")
    drawing.line(LEFT, base, LEFT + COLUMN * len(UNITS), base, FAINT, 1)
    for i, value in enumerate(values):
        tone = colour(sum(place <= i for place in places))
        tall = max(1, (ROW - 26) * value / max(values))
        x, fill = LEFT + COLUMN * (i + shift) + 5, tone
        if shift and i + 1 not in places:
            fill = "#ffffff"
        drawing.box(x, base - tall, COLUMN - 10, tall, tone, fill, 1, radius=1)


def _first_kept(measured: Sequence[Unit]) -> list[int]:
    """The bytes that each unit is the first to keep."""
    seen: dict[StorageWeakRef, int] = {}
    found = []
    for unit in measured:
        found.append(sum(n for key, n in unit.saved.items() if key not in seen))
        seen |= unit.saved
    return found


def _said(stage: Weight) -> tuple[str, str, str, str]:
    work = f"{stage.flops / 1e9:.2f} GFLOP"
    return (
        f"{stage.parameters / 1e6:.2f} M",
        bytes_text(stage.kept),
        work,
        bytes_text(stage.sends),
    )


def _text(stages: Sequence[Weight], cuts: Sequence[str]) -> str:
    lines = [f"cut before {', '.join(cuts)}"]
    for s, stage in enumerate(stages):
        parameters, kept, work, sends = _said(stage)
        line = f"device {s}: {parameters} parameters, {kept} of activations, {work}"
        lines.append(line + (f", sends {sends}" if s < len(cuts) else ""))
    return "\n".join(lines)


def _axis(drawing: Drawing, height: float) -> None:
    """The names of the units, those of a layer under one bracket."""
    for i, name in enumerate(UNITS):
        x = LEFT + COLUMN * (i + 0.5)
        layer, _, block = name.partition(".")
        drawing.label(x, height - 24, block or layer, 11 if block else 9.5)
        if block == "0":
            wide = COLUMN * sum(other.startswith(layer) for other in UNITS)
            left = x - COLUMN / 2
            drawing.line(left + 4, height - 18, left + wide - 4, height - 18, FAINT, 1.5)
            drawing.label(left + wide / 2, height - 5, layer, 12)
