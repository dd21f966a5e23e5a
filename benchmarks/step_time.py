"""Where does a training step spend its time, by number of ranks and by method?

    python benchmarks/step_time.py [--repeats 5]

The network and the batch of the notebook on distributed SGD. Both ways to average run in
turns inside the same ranks; prints medians over the repeats, and how many times longer all
communication takes with one all_reduce a parameter than with one flat buffer.
"""

import argparse
import statistics

from mgpu_tutorial import distributed_sgd as sgd
from mgpu_tutorial.lab import Table, launch

METHODS = [sgd.average_gradients, sgd.average_flat]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    rows = []
    for ranks in (1, 2, 4):
        runs = [
            launch(sgd.step_times, ranks, METHODS, device="cpu", timeout=120).results[0]
            for _ in range(given.repeats)
        ]
        ratio = statistics.median(
            run["average_gradients"][1] / run["average_flat"][1] for run in runs
        )
        for method in METHODS:
            name = method.__name__
            columns = zip(*(run[name] for run in runs), strict=True)
            compute, communicate = (1e3 * statistics.median(column) for column in columns)
            rows.append(
                [ranks, name, round(compute, 1), round(communicate, 2), f"{ratio:.1f}"]
            )
    header = ["ranks", "method", "compute ms", "communicate ms", "parameter by flat"]
    print(f"global batch 128, gloo on CPU, {given.repeats} runs of 10 steps")
    print(Table(header, rows))


if __name__ == "__main__":
    main()
