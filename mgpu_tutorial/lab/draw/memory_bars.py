"""The bytes of a ledger as bars: a bar for each device, cut by what the bytes are for."""

from collections.abc import Iterable, Mapping
from itertools import cycle

from mgpu_tutorial.lab.colours import tone_of
from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.record.memory import CATEGORIES, Ledger
from mgpu_tutorial.lab.words import bytes_text

# Colour and hatch, told apart in grey too: the usual categories, and what else there is.
USUAL = (("#5e6b7a", ""), ("#ffffff", "||||"), ("#f2b36b", "////"), ("#b9d7a8", "...."))
LOOKS = dict(zip(CATEGORIES, (*USUAL, ("#a9c9e8", "")), strict=True))
OTHERS = (("#d8c3e8", "xxxx"), ("#f7e08b", "----"), ("#eec0c8", "\\\\\\\\"))
ROW, TITLE, LEGEND = 0.42, 0.3, 0.3  # inches


def memory_bars(named: Mapping[str, Ledger]) -> Plot:
    """Draw a bar for each device of each named ledger, cut by category; all on one scale.

    Raises ValueError for a ledger in which nothing is counted.
    """
    from matplotlib.figure import Figure  # a second to import: not for the ranks
    from matplotlib.patches import Patch

    if not all(ledger.devices for ledger in named.values()):
        raise ValueError("nothing is counted: use saved_for_backward, record_state or add")
    rows = [ledger[device] for ledger in named.values() for device in ledger.devices]
    looks = _looks_of(rows)
    heights = [TITLE + ROW * len(ledger.devices) for ledger in named.values()]
    size = (9, sum(heights) + LEGEND + 0.15)
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(named), squeeze=False, height_ratios=heights)[:, 0]
    most = max(sum(row.values()) for row in rows)
    for axes, (name, ledger) in zip(panels, named.items(), strict=True):
        axes.set_xlim(0, 1.16 * most)
        axes.set_title(name, loc="left", fontsize=12, fontweight="bold")
        _bars(axes, ledger, looks)
    seen = {name for row in rows for name in row if row[name] > 0.004 * most}
    patches = [Patch(**_style(looks[name]), label=name) for name in looks if name in seen]
    style = {"fontsize": 11, "frameon": False, "handlelength": 2.2, "handleheight": 1.1}
    figure.legend(handles=patches, loc="outside upper left", ncols=5, **style)
    return Plot(figure, _text(named, looks))


def _looks_of(rows: Iterable[Mapping[str, int]]) -> dict[str, tuple[str, str]]:
    """Colour and hatch of each category, the usual categories first."""
    found = dict.fromkeys(name for row in rows for name in row)
    others = dict(zip((n for n in found if n not in LOOKS), cycle(OTHERS), strict=False))
    return {name: look for name, look in (LOOKS | others).items() if name in found}


def _style(look: tuple[str, str]) -> dict[str, object]:
    return {"facecolor": look[0], "hatch": look[1], "edgecolor": INK, "linewidth": 0.6}


def _bars(axes, ledger: Ledger, looks: dict[str, tuple[str, str]]) -> None:
    devices = ledger.devices
    axes.set_ylim(len(devices) - 0.5, -0.5)
    axes.set_yticks(range(len(devices)), devices)
    axes.tick_params(length=0)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    widest = axes.get_xlim()[1]
    for row, (device, tick) in enumerate(zip(devices, axes.get_yticklabels(), strict=True)):
        tick.set(color=tone_of(device).text, fontweight="bold", fontsize=12)
        left = 0
        for name, look in looks.items():
            nbytes = ledger[device].get(name, 0)
            if nbytes:
                axes.barh(row, nbytes, 0.72, left, **_style(look))
            if nbytes > 0.09 * widest:
                place, box = left + nbytes / 2, {"facecolor": "white", "lw": 0, "pad": 1.5}
                text = bytes_text(nbytes)
                axes.text(place, row, text, ha="center", va="center", fontsize=11, bbox=box)
            left += nbytes
        text = f" {bytes_text(left)}"
        axes.text(left, row, text, va="center", fontsize=12, fontweight="bold")


def _text(named: Mapping[str, Ledger], categories: Iterable[str]) -> str:
    lines = []
    for name, ledger in named.items():
        lines.append(name)
        for device in ledger.devices:
            row = ledger[device]
            parts = [f"{c} {bytes_text(row[c])}" for c in categories if c in row]
            lines.append(f"{device}  {bytes_text(ledger.total(device))}: {', '.join(parts)}")
    return "\n".join(lines)
