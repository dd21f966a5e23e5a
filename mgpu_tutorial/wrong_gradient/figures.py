"""Apparatus: the curves, and tables of tests and clues."""

import math
from collections.abc import Mapping, Sequence

from mgpu_tutorial.lab import Table
from mgpu_tutorial.lab.draw.drawing import INK
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.wrong_gradient.faults import FAULTS
from mgpu_tutorial.wrong_gradient.trials import Gradients, Trial
from mgpu_tutorial.wrong_gradient.zoo import OWN_PARTS, Compared

SHOWN = 4  # names in a row of clues


def losses_plot(runs: Mapping[str, Mapping[int, Sequence[float]]]) -> Plot:
    """The losses over the steps, a panel an optimizer; a line for factor 1, else marks."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.0), layout="constrained")
    panels = figure.subplots(1, len(runs), sharey=True, squeeze=False)[0]
    for axes, (optimizer, by_factor) in zip(panels, runs.items(), strict=True):
        for factor, losses in by_factor.items():
            steps = range(1, len(losses) + 1)
            if factor == 1:
                axes.plot(steps, losses, color=INK, linewidth=1.5, label="right")
            else:
                marks = {"markersize": 5, "markevery": 3, "markerfacecolor": "none"}
                axes.plot(steps, losses, "o", color=INK, label=f"× {factor}", **marks)
        axes.set_title(optimizer, fontsize=12)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("loss")
    panels[0].legend(frameon=False, fontsize=11, loc="lower left")
    return Plot(figure, f"loss against step, right and too long: {', '.join(runs)}")


def tests_table(rows: Mapping[str, Sequence[bool]]) -> Table:
    """A row for each fault: which of three tests tells."""
    head, lines = ["fault", "plans", "one process", "copies", "twice the ranks"], []
    for name, row in rows.items():
        plans = " → ".join(FAULTS[name].plans)
        lines.append([name, plans, *("yes" if told else "-" for told in row)])
    return Table(head, lines)


def how_wrong(found: Gradients, right: Gradients) -> dict[str, str]:
    """For each gradient "right", its factor, or how far it is off, the last layer first."""
    said = {}
    for name in reversed(right):
        one, other = found[name].flatten(), right[name].flatten()
        factor = (one @ other / (other @ other)).item()
        far = ((one - other).norm() / other.norm()).item()
        rest = ((one - factor * other).norm() / other.norm()).item()
        words = f"off by {100 * far:.1f}%" if far < 0.1 else f"off by {100 * far:.0f}%"
        words = f"{factor:.2f} times" if rest < 1e-9 else words
        said[name] = "right" if far < 1e-9 else words
    return said


def clues(trial: Trial, right: Gradients, most: float = math.inf) -> Table:
    """What is wrong after a step that clips to the norm `most`: like gradients in a row.

    `right` are those of one process, which are clipped here. The last layer comes first, as
    on the way backward.
    """
    norm = sum(g.square().sum() for g in right.values()).sqrt().item()
    clipped = {name: gradient * min(1.0, most / norm) for name, gradient in right.items()}
    said = how_wrong(trial.gradients, clipped)
    alike: dict[str, list[str]] = {}
    for name in said:
        alike.setdefault(_kind(said[name]), []).append(name)
    rows = []
    for names in alike.values():
        several = names[: SHOWN - 1] + ["…", names[-1]] if len(names) > SHOWN else names
        words = _range([said[name] for name in names])
        rows.append([f"{len(names)}: {', '.join(several)}", words])
    what = "are" if most == math.inf else f"are, clipped to {most:g}"
    return Table(["gradients, the last layer first", what], rows)


def _kind(said: str) -> str:
    return "off" if said.startswith("off") else said


def _range(words: list[str]) -> str:
    """One word for all, such as "right", or from how much to how much they are off."""
    if len(set(words)) == 1:
        return words[0]
    numbers = sorted(float(word.split()[2].rstrip("%")) for word in words)
    return f"off by {numbers[0]:g} to {numbers[-1]:g}%"


def zoo_table(compared: Mapping[str, Compared]) -> Table:
    """A row for each fault of the zoo: what finds it, and what is said of it."""
    rows = []
    for name, (proof, found, right) in compared.items():
        row = [name.replace("_", " "), "nothing", "", ""]
        if name in OWN_PARTS:
            (words,) = how_wrong({name: found}, {name: right}).values()
            row[1:3] = "one process", f"its tensor is {words}"
        elif not proof.right:
            first, forward = proof.first, [r for r in proof.remarks if "forward" in r][0]
            where = forward.partition("output of ")[2].partition(":")[0]
            row[1:] = "prove", f"{first.when}: {first.kind}", where or "right"
        rows.append(row)
    return Table(["fault", "found by", "first wrong", "forward goes wrong in"], rows)
