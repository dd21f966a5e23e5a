"""The idle share of pipelines whose stages pause instead of computing, beside the formula.

    python benchmarks/pipeline.py [--repeats 3]

Four ranks, by schedule and number of micro-batches; the median over the launches, each with
the fastest of its steps.
"""

import statistics

from common import options

from mgpu_tutorial.lab import Table, launch
from mgpu_tutorial.model_parallel.tasks import fastest_step, idle_share, pipeline_steps
from mgpu_tutorial.pipelines import figures, schedules, work


def main() -> None:
    given = options(__doc__, repeats=3)
    rows = []
    for name in ("GPipe", "1F1B", "interleaved 1F1B"):
        stages = len(schedules.stages_on_rank(name, 0, 4))
        for micro in (4, 8, 16):
            what = name, micro, work.Pauses(4, 0.02)
            shares = []
            for _ in range(given.repeats):
                report = launch(figures.measure_schedule, 4, *what, trace=True)
                shares.append(idle_share(fastest_step(pipeline_steps(report))))
            formula = f"{schedules.bubble(4, micro, stages):.0%}"
            rows.append([name, micro, formula, f"{statistics.median(shares):.0%}"])
    print("four ranks that pause for 20 ms a forward, 40 ms a backward")
    print(Table(["schedule", "micro-batches", "formula", "measured idle share"], rows))


if __name__ == "__main__":
    main()
