"""The bytes of a ledger as bars: a bar for each device, cut by what the bytes are for."""

from collections.abc import Iterable, Mapping
from itertools import cycle

from mgpu_tutorial.lab.colours import MEMORY, tone_of
from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.memory import CATEGORIES, Ledger
from mgpu_tutorial.lab.words import bytes_text

# Colour and hatch, told apart in grey too: of the usual categories, then of others.
MARKS = ("", "||||", "////", "....", "----")
LOOKS = (
    *(
        (MEMORY[category.split()[0]], mark)
        for category, mark in zip(CATEGORIES, MARKS, strict=True)
    ),
    *(("#d8c3e8", "xxxx"), ("#a9c9e8", ""), ("#eec0c8", "\\\\\\\\")),
)


def memory_bars(named: Mapping[str, Ledger]) -> Plot:
    """Draw a bar for each device of each named ledger, cut by category; all on one scale.

    Raises ValueError for a ledger in which nothing is counted.
    """
    from matplotlib.figure import Figure  # a second to import: not for the ranks
    from matplotlib.patches import Patch

    if not all(ledger.devices for ledger in named.values()):
        raise ValueError("nothing is counted: use saved_for_backward, record_state or add")
    rows = [ledger[device] for ledger in named.values() for device in ledger.devices]
    names = dict.fromkeys([*CATEGORIES, *(name for row in rows for name in row)])
    looks = {
        name: {"facecolor": fill, "hatch": hatch, "edgecolor": INK, "linewidth": 0.6}
        for name, (fill, hatch) in zip(names, cycle(LOOKS), strict=False)
    }
    heights = [0.3 + 0.42 * len(ledger.devices) for ledger in named.values()]  # inches
    figure = Figure(figsize=(9, sum(heights) + 0.45), layout="constrained")
    panels = figure.subplots(len(named), squeeze=False, height_ratios=heights)[:, 0]
    most = max(sum(row.values()) for row in rows)
    for axes, (name, ledger) in zip(panels, named.items(), strict=True):
        axes.set_title(name, loc="left", fontsize=12, fontweight="bold")
        _bars(axes, ledger, looks, 1.16 * most)
    seen = {name for row in rows for name in row if row[name] > 0.004 * most}
    patches = [Patch(**looks[name], label=name) for name in looks if name in seen]
    style = {"fontsize": 11, "frameon": False, "handlelength": 2.2, "handleheight": 1.1}
    figure.legend(handles=patches, loc="outside upper left", ncols=5, **style)
    return Plot(figure, _text(named, looks))


def _bars(axes, ledger: Ledger, looks: Mapping[str, dict], widest: float) -> None:
    devices = ledger.devices
    axes.set(xlim=(0, widest), ylim=(len(devices) - 0.5, -0.5), xticks=[])
    axes.set_yticks(range(len(devices)), devices)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    for row, (device, tick) in enumerate(zip(devices, axes.get_yticklabels(), strict=True)):
        tick.set(color=tone_of(device).text, fontweight="bold", fontsize=12)
        left, style = 0, {"va": "center", "fontsize": 11}
        row_bytes = ledger[device]
        for name in filter(row_bytes.get, looks):
            nbytes = row_bytes[name]
            axes.barh(row, nbytes, 0.72, left, **looks[name])
            if nbytes > 0.09 * widest:
                place, box = left + nbytes / 2, {"facecolor": "white", "lw": 0, "pad": 1.5}
                axes.text(place, row, bytes_text(nbytes), ha="center", bbox=box, **style)
            left += nbytes
        axes.text(left, row, f" {bytes_text(left)}", fontweight="bold", **style)


def _text(named: Mapping[str, Ledger], categories: Iterable[str]) -> str:
    lines = []
    for name, ledger in named.items():
        lines.append(name)
        for device in ledger.devices:
            row = ledger[device]
            parts = [f"{c} {bytes_text(row[c])}" for c in categories if c in row]
            lines.append(f"{device}  {bytes_text(ledger.total(device))}: {', '.join(parts)}")
    return "\n".join(lines)
