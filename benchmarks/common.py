"""What the benchmarks share: options, several launches of one worker, medians and ratios."""

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from mgpu_tutorial.lab import launch


def options(doc: str, **defaults: int) -> argparse.Namespace:
    """The numbers that the command line gives, such as --ranks 4; else these."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=doc, formatter_class=raw)
    for name, default in defaults.items():
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=default, help=f"instead of {default}")
    return parser.parse_args()


def repeat(repeats: int, ranks: int, worker: Callable, *args: Any) -> dict[str, list]:
    """What rank 0 of each of several launches returns under each name."""
    returned: dict[str, list] = {}
    for _ in range(repeats):
        report = launch(worker, ranks, *args, device="cpu", timeout=600)
        for name, value in report.results[0].items():
            returned.setdefault(name, []).append(value)
    return returned


def median_ms(seconds: Sequence[float], digits: int = 1) -> float:
    """The median in milliseconds."""
    return round(1e3 * statistics.median(seconds), digits)


def ratio(ours: Sequence[float], theirs: Sequence[float], digits: int = 2) -> str:
    """How many times as long ours takes: the median over the turns of their two times."""
    pairs = zip(ours, theirs, strict=True)
    return f"{statistics.median(our / their for our, their in pairs):.{digits}f}"
