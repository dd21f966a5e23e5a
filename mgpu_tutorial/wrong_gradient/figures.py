"""Apparatus: tables of faults, tests and clues, and the judge of a finding."""

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path

from mgpu_tutorial.lab import Table, curves
from mgpu_tutorial.lab.draw.plot import Plot
from mgpu_tutorial.lab.teach.checks import CORRECT, verdict
from mgpu_tutorial.lab.teach.verdict import Verdict
from mgpu_tutorial.wrong_gradient import job
from mgpu_tutorial.wrong_gradient.faults import FAULTS
from mgpu_tutorial.wrong_gradient.seeds import hidden
from mgpu_tutorial.wrong_gradient.trials import Gradients, Trial

SHOWN = 4  # names in a row of clues


def losses_plot(runs: Mapping[str, Sequence[float]]) -> Plot:
    """The losses over the steps: right gradients as a line, wrong ones as marks."""
    series = {name: (range(1, len(run) + 1), run) for name, run in runs.items()}
    marks = {name: run for name, run in series.items() if "4" in name}
    lines = {name: run for name, run in series.items() if name not in marks}
    return curves(marks, lines, "step", "loss", "linear")


def faults_table() -> Table:
    """Of each fault the line of the job, and what stands there instead."""
    rows = [
        [name, fault.right.strip(), fault.wrong.strip()] for name, fault in FAULTS.items()
    ]
    return Table(["fault", "in place of", "stands"], rows)


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
        words = f"off by {100 * far:.1f} %" if far < 0.1 else f"off by {100 * far:.0f} %"
        words = f"{factor:.2f} times" if rest < 1e-9 else words
        said[name] = "right" if far < 1e-9 else words
    return said


def clues(pair: tuple[Trial, Trial], right: Gradients) -> Table:
    """What is wrong before the clip, and after it to the norm 0.5: like gradients in a row.

    The last layer comes first, as on the way backward.
    """
    norm = sum(g.square().sum() for g in right.values()).sqrt().item()
    clipped = {name: gradient * min(1.0, 0.5 / norm) for name, gradient in right.items()}
    free, cut = how_wrong(pair[0].gradients, right), how_wrong(pair[1].gradients, clipped)
    alike: dict[tuple[str, str], list[str]] = {}
    for name in free:
        alike.setdefault((_kind(free[name]), _kind(cut[name])), []).append(name)
    rows = []
    for names in alike.values():
        several = names[: SHOWN - 1] + ["…", names[-1]] if len(names) > SHOWN else names
        words = [_range([said[name] for name in names]) for said in (free, cut)]
        rows.append([f"{len(names)}: {', '.join(several)}", *words])
    return Table(["gradients, the last layer first", "without clipping", "clipped"], rows)


def _kind(said: str) -> str:
    return "off" if said.startswith("off") else said


def _range(words: list[str]) -> str:
    """One word for all, such as "right", or from how much to how much they are off."""
    if len(set(words)) == 1:
        return words[0]
    numbers = sorted(float(word.split()[2]) for word in words)
    return f"off by {numbers[0]:g} to {numbers[-1]:g} %"


def judge(number: int, finding: object) -> None:
    """Say whether a finding [function, line] names a hidden fault, and which tests tell."""
    from IPython.display import display

    fault = hidden(f"seed {number}")
    lines = [line_of(text) for text in (fault.right, *fault.also)]
    given = finding[1] if isinstance(finding, list | tuple) and len(finding) == 2 else None
    expected = [fault.function, given if given in lines else lines[0]]
    if given in lines and finding[0] in fault.function.split("."):
        finding = expected  # "Sum" or "backward" says as much as "Sum.backward"
    said = verdict(finding, expected)
    if said.is_right:
        wrong = " ".join(fault.wrong.split())
        said = Verdict(
            CORRECT, True, f"it is now {wrong}. What tells: {', '.join(fault.tests)}"
        )
    display(said)


def line_of(text: str) -> int:
    """The number of the line of the job in which a text begins."""
    before = Path(inspect.getsourcefile(job)).read_text("utf-8").partition(text)[0]
    return before.count("\n") + 1
