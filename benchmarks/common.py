"""What the benchmarks share: options, several launches of one worker, medians and ratios."""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from mgpu_tutorial.lab import Table, launch
from mgpu_tutorial.lab.measure import in_turns


def options(doc: str, *flags: str, **defaults: int) -> argparse.Namespace:
    """What the command line gives: numbers such as --ranks 4, else these; and flags."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in flags:
        parser.add_argument(f"--{name}", action="store_true")
    return parser.parse_args()


def all_turns(given: argparse.Namespace, worker: Callable, *args: Any) -> dict[Any, list]:
    """What rank 0 measured under each name, in the turns of all launches."""
    turns: dict[Any, list] = {}
    for _ in range(given.repeats):
        report = launch(worker, given.ranks, *args, device="cpu", timeout=600)
        for name, measured in report.results[0].items():
            turns.setdefault(name, []).extend(measured)
    return turns


def both_ways(
    forwards: Mapping[str, Callable[[], torch.Tensor]], turns: int
) -> dict[str, list[tuple[float, float]]]:
    """The seconds of each forward and backward, in turns, after two that do not count."""
    outputs: dict[str, torch.Tensor] = {}

    def forward(name: str) -> None:
        outputs[name] = forwards[name]()

    def backward(name: str) -> None:
        outputs.pop(name).sum().backward()

    parts = {(f, name): partial(f, name) for name in forwards for f in (forward, backward)}
    taken = in_turns(parts, turns, warm_up=2)
    return {n: [*zip(taken[forward, n], taken[backward, n], strict=True)] for n in forwards}


def show(given: argparse.Namespace, header: Sequence[str], rows: list) -> None:
    """The table, and with what it was measured."""
    numbers = ", ".join(f"{name} {number}" for name, number in vars(given).items())
    print(f"gloo on CPU: {numbers}")
    print(Table(header, rows))


def median_ms(seconds: Sequence[float]) -> float:
    return round(1e3 * statistics.median(seconds), 1)


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> str:
    """How many times as long ours takes: of both in the same turn, the median over all."""
    turns = zip(ours, theirs, strict=True)
    return f"{statistics.median(our / their for our, their in turns):.2f}"
