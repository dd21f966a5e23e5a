"""Tensor parallel by model size: ours beside PyTorch's parallelize_module.

    python benchmarks/tensor_parallel.py [--ranks 2] [--steps 10] [--repeats 3]

Both run forward with the loss, and backward, in turns inside the same ranks; with slices of
the sequence too. Prints the median milliseconds of each, and how many times as long as
PyTorch's it takes (the median over all turns of the ratio of the two in one turn).
"""

import argparse
import statistics

from mgpu_tutorial.lab import Table, launch
from mgpu_tutorial.tensor_parallel.figures import time_ways
from mgpu_tutorial.tensor_parallel.torch_plan import by_torch, by_torch_in_slices
from mgpu_tutorial.tensor_parallel.training import in_pieces, in_slices

SIZES = {  # of a SmallTransformer, and the sequences and tokens of a batch
    "0.2 MB": ({"vocabulary": 64, "width": 48, "heads": 4, "depth": 2}, (4, 16)),
    "3 MB": ({"vocabulary": 256, "width": 128, "heads": 4, "depth": 4}, (4, 32)),
    "26 MB": ({"vocabulary": 1024, "width": 384, "heads": 8, "depth": 4}, (4, 64)),
    "105 MB": ({"vocabulary": 4096, "width": 768, "heads": 8, "depth": 3}, (4, 64)),
}
PAIRS = (  # ours, and what it is compared with
    ("in pieces", "parallelize_module"),
    ("in slices", "parallelize_module in slices"),
)
WAYS = {
    "in pieces": in_pieces,
    "parallelize_module": by_torch,
    "in slices": in_slices,
    "parallelize_module in slices": by_torch_in_slices,
}
COLUMNS = ("ms", "of PyTorch", "ratio")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    rows = []
    for size, (model, batch) in SIZES.items():
        found: dict[str, list[tuple[float, float]]] = {}
        for _ in range(given.repeats):
            what = WAYS, model, batch, given.steps
            report = launch(time_ways, given.ranks, *what, device="cpu", timeout=600)
            for name, times in report.results[0].items():
                found.setdefault(name, []).extend(times)
        for ours, theirs in PAIRS:
            row: list[object] = [size, ours]
            for part in range(2):  # forward, backward
                mine, other = (
                    [turn[part] for turn in found[name]] for name in (ours, theirs)
                )
                row += [round(1e3 * statistics.median(times), 1) for times in (mine, other)]
                ratios = [a / b for a, b in zip(mine, other, strict=True)]
                row.append(f"{statistics.median(ratios):.2f}")
            rows.append(row)
    print(f"{given.ranks} ranks, gloo on CPU, {given.repeats} runs of {given.steps} steps")
    head = [f"{part} {what}" for part in ("forward", "backward") for what in COLUMNS]
    print(Table(["parameters", "", *head], rows))


if __name__ == "__main__":
    main()
