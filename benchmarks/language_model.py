"""A language model by plan: seconds a step, and how much of them is communication.

    python benchmarks/language_model.py [--steps 10] [--repeats 3]

The plans of four ranks take turns with one process. Prints the median milliseconds of a
step, how many times as long as one process's it is, and the share of it that rank 0 spends
in calls of torch.distributed, waiting for slower ranks included.
"""

import statistics

from common import median_ms, options

from mgpu_tutorial.lab import Table, launch, span
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.language_model import train
from mgpu_tutorial.language_model.plan import plan_of

PLANS = ("dp=1", "dp=4", "dp=4,zero=1", "dp=2,tp=2", "dp=2,pp=2", "tp=4", "pp=4", "cp=4")


def timed(rank: int, world_size: int, plan: str, steps: int) -> list[float]:
    """Train; a span is open from the end of each step to the end of the next."""
    inside = []

    def after_step(step: int) -> None:
        if inside:
            inside.pop().__exit__(None, None, None)
        if step + 1 < steps:
            inside.append(span(f"step {step + 1}"))
            inside[-1].__enter__()

    return train(rank, world_size, plan, steps, after_step=after_step)


def main() -> None:
    given = options(__doc__, steps=10, repeats=3)
    seconds, talked = {plan: [] for plan in PLANS}, {plan: [] for plan in PLANS}
    for _ in range(given.repeats):
        for plan in PLANS:
            how = {"trace": True, "device": "cpu", "timeout": 600}
            report = launch(timed, plan_of(plan).ranks, plan, given.steps, **how)
            for i in range(2, given.steps):
                whole = next(
                    e for e in report.events if e.rank == 0 and e.note == f"step {i}"
                )
                calls = [e for e in events_of(report, f"step {i}") if e.rank == 0]
                seconds[plan].append(whole.end - whole.begin)
                talked[plan].append(sum(e.end - e.begin for e in calls))
    alone = statistics.median(seconds["dp=1"])
    rows = []
    for plan in PLANS:
        step = statistics.median(seconds[plan])
        share = f"{statistics.median(talked[plan]) / step:.0%}"
        rows.append([plan, median_ms(seconds[plan]), f"{step / alone:.2f}", share])
    print(Table(["plan", "ms a step", "times one process", "in calls"], rows))


if __name__ == "__main__":
    main()
