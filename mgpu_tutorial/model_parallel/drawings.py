"""Only draws: what each device has of ResNet-50, unit by unit, for a choice of cuts."""

from collections.abc import Sequence

from mgpu_tutorial.lab.colours import colour, tone
from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.words import bytes_text
from mgpu_tutorial.model_parallel.measurements import StageCost, Unit, stage_costs
from mgpu_tutorial.model_parallel.resnet_cuts import UNITS

ROWS = ("parameters", "activations", "work", "sends")


def cut_picture(measured: Sequence[Unit], cuts: Sequence[str]) -> Plot:
    """Draw parameters, activations, work and bytes sent, unit by unit, a colour a device.

    Raises ValueError for cuts that ResNet-50 does not have.
    """
    from matplotlib.figure import Figure

    stages, positions = stage_costs(measured, cuts), [UNITS.index(name) for name in cuts]
    tones = [colour(sum(place <= i for place in positions)) for i in range(len(UNITS))]
    figure = Figure(figsize=(9, 1.3 * len(ROWS) + 1.2), layout="constrained")
    grid = figure.subplots(len(ROWS), 1, sharex=True)
    values = [
        [unit.parameters for unit in measured],
        _first_saved(measured),
        [unit.flops for unit in measured],
    ]
    for axes, heights in zip(grid, values, strict=False):
        axes.bar(range(len(UNITS)), heights, 0.74, color=tones)
    sent = [unit.output_bytes for unit in measured[:-1]]
    crosses = [tone if i + 1 in positions else "none" for i, tone in enumerate(tones[:-1])]
    between = [i + 0.5 for i in range(len(sent))]
    grid[-1].bar(between, sent, 0.6, color=crosses, edgecolor=tones[:-1], linewidth=1.2)
    for axes, name, texts in zip(grid, ROWS, _texts(stages), strict=True):
        axes.set_ylabel(name, rotation=0, ha="right", va="center", fontsize=13)
        axes.set(yticks=[], xlim=(-0.6, len(UNITS) - 0.4))
        axes.tick_params(axis="x", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        for position in positions:
            axes.axvline(position - 0.5, color=INK, linewidth=2, linestyle="--")
        for s, text in enumerate(texts):
            place = (1.02, 0.9 - 0.25 * s)
            look = {"color": tone(s).text, "fontweight": "bold", "fontsize": 12, "va": "top"}
            axes.annotate(text, place, xycoords="axes fraction", **look)
    _name_units(grid[-1])
    grid[0].set_title(_title(cuts), fontsize=13)
    return Plot(figure, _text(stages, cuts))


def _first_saved(measured: Sequence[Unit]) -> list[int]:
    """The bytes that each unit is the first to save."""
    seen: set[object] = set()
    found = []
    for unit in measured:
        found.append(sum(nbytes for key, nbytes in unit.saved.items() if key not in seen))
        seen |= unit.saved.keys()
    return found


def _texts(stages: Sequence[StageCost]) -> list[list[str]]:
    """What stands beside each row: its sum for every device, and what crosses each cut."""
    devices = [
        [f"device {s}: {text}" for s, text in enumerate(texts)]
        for texts in zip(*(_amounts(stage)[:-1] for stage in stages), strict=True)
    ]
    return [*devices, [f"{_amounts(stage)[-1]} sent" for stage in stages[:-1]]]


def _amounts(stage: StageCost) -> tuple[str, str, str, str]:
    return (
        f"{stage.parameters / 1e6:.2f} M",
        bytes_text(stage.activation_bytes),
        f"{stage.flops / 1e9:.2f} GFLOP",
        bytes_text(stage.output_bytes),
    )


def _title(cuts: Sequence[str]) -> str:
    return f"cut before {', '.join(cuts)}"


def _text(stages: Sequence[StageCost], cuts: Sequence[str]) -> str:
    lines = [_title(cuts)]
    for s, stage in enumerate(stages):
        parameters, saved, work, sends = _amounts(stage)
        line = f"device {s}: {parameters} parameters, {saved} of activations, {work}"
        lines.append(line + (f", sends {sends}" if s < len(cuts) else ""))
    return "\n".join(lines)


def _name_units(axes) -> None:
    """The number of each block, its layer below, and the other units on their side."""
    for i, name in enumerate(UNITS):
        layer, _, block = name.partition(".")
        look = {"ha": "center", "va": "top", "annotation_clip": False, "fontsize": 11}
        place = {"xycoords": ("data", "axes fraction")}
        axes.annotate(
            block or layer, (i, -0.06), rotation=0 if block else 90, **look, **place
        )
        if block == "0":
            blocks = sum(other.startswith(f"{layer}.") for other in UNITS)
            middle = i + (blocks - 1) / 2
            axes.annotate(layer, (middle, -0.34), fontweight="bold", **look, **place)
    axes.set_xticks([])
