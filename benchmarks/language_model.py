"""A language model by plan: seconds a step, and how much of them is communication.

    python benchmarks/language_model.py [--steps 10] [--repeats 3]

The plans of four ranks take turns with one process, at last with four experts in each block,
which ranks share or each rank has. Prints the median step, and the share of
it that rank 0 spends in calls of torch.distributed, waiting for slower ranks included.
"""

import statistics
from contextlib import ExitStack

from common import options

from mgpu_tutorial.lab import Table, launch, span
from mgpu_tutorial.lab.record.intervals import events_of, milliseconds
from mgpu_tutorial.language_model import train
from mgpu_tutorial.language_model.plan import plan_of

PLANS = ("dp=1", "dp=4", "dp=4,zero=1", "dp=2,tp=2", "dp=2,pp=2", "tp=4", "pp=4", "cp=4")
RUNS = [(plan, 0) for plan in PLANS] + [(plan, 4) for plan in ("dp=1", "dp=4", "dp=4,ep=4")]


def timed(rank: int, world_size: int, plan: str, steps: int, experts: int) -> None:
    """Train; a span is open from the end of each step to the end of the next."""
    with ExitStack() as opened:

        def after_step(step: int) -> None:
            opened.close()
            opened.enter_context(span(f"step {step + 1}"))

        train(rank, world_size, plan, steps, after_step=after_step, experts=experts)


if __name__ == "__main__":
    given = options(__doc__, steps=10, repeats=3)
    taken = {run: [] for run in RUNS}
    for _ in range(given.repeats):
        for plan, experts in RUNS:
            how = {"trace": True, "device": "cpu", "timeout": 600}
            report = launch(timed, plan_of(plan).ranks, plan, given.steps, experts, **how)
            for step in (f"step {i}" for i in range(2, given.steps)):
                calls = [e for e in events_of(report, step) if e.rank == 0]
                talked = 1e3 * sum(e.end - e.begin for e in calls)
                taken[plan, experts].append((milliseconds(report, step), talked))
    rows, one = [], statistics.median(step for step, _ in taken["dp=1", 0])
    for (plan, experts), pairs in taken.items():
        step, talked = map(statistics.median, zip(*pairs, strict=True))
        name = plan + f", {experts} experts" * (experts > 0)
        rows.append([name, round(step, 1), f"{step / one:.2f}", f"{talked / step:.0%}"])
    print(Table(["plan", "ms a step", "times one process", "in calls"], rows))
