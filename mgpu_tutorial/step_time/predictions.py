"""The published steps by the cost model: fit on the rows that are named, predict the rest."""

import math
from typing import NamedTuple

from mgpu_tutorial.shared.cost_model.fitting import fit_gpu
from mgpu_tutorial.shared.cost_model.machines import GPU
from mgpu_tutorial.shared.cost_model.step import PredictedStep, hardware_flops, predict_step
from mgpu_tutorial.step_time.published import Run, runs_of

# Whose fitted numbers a family without fitted rows takes: same program, same machine.
BORROWED = {
    "Megatron 2021, table 2": "Megatron 2021, table 1",
    "ZeRO-3 of 2021": "Megatron 2021, table 1",
}
TWO_NUMBERS = ("Megatron 2021, table 1", "Megatron 2022")  # the others have one fitted row


class Prediction(NamedTuple):
    """A published row, our seconds and those of the null guess, and the step by parts."""

    run: Run
    null: float
    step: PredictedStep

    @property
    def predicted(self) -> float:
        """Ours, in the unit of the authors."""
        return self.run.in_unit(self.step.seconds)

    @property
    def error(self) -> float:
        """Of the rate, whatever the authors' unit: above 0 we predict too fast a step."""
        return self.run.seconds / self.step.seconds - 1

    @property
    def null_error(self) -> float:
        """Of the null guess, counted in the same way."""
        return self.run.seconds / self.null - 1


def gpu_of(family: str) -> GPU:
    """The GPU of a family, with the numbers that its fitted rows give."""
    measured = [run.measured() for run in fitted_runs(family)]
    if family in TWO_NUMBERS or family in BORROWED:
        return fit_gpu(measured)
    return fit_gpu(measured, gpu_of("Megatron 2022").activation_passes)


def fitted_runs(family: str) -> list[Run]:
    """The rows that tell the numbers of this family's GPU."""
    return [run for run in runs_of(BORROWED.get(family, family)) if run.fitted]


def null_seconds(run: Run, fitted: list[Run]) -> float:
    """The null guess: the operations per second and GPU stay as in the fitted row.

    Of several fitted rows the one that recomputes alike, then the nearest number of GPUs.
    """

    def distance(row: Run) -> tuple[bool, float]:
        far = abs(math.log(row.plan.ranks / run.plan.ranks))
        return row.plan.recompute != run.plan.recompute, far

    row = min(fitted, key=distance)
    return row.seconds * operations(run) / operations(row)


def operations(run: Run) -> float:
    """What one GPU computes in a step, with what it computes again."""
    tokens = run.batch * run.model.sequence / run.plan.ranks
    return tokens * hardware_flops(run.model, run.plan)


def predict(family: str) -> list[Prediction]:
    """Every row of a family, the fitted ones too."""
    gpu, fitted, rows = gpu_of(family), fitted_runs(family), []
    for run in runs_of(family):
        cluster = run.cluster._replace(gpu=gpu)
        step = predict_step(run.model, cluster, run.plan, run.batch)
        rows.append(Prediction(run, null_seconds(run, fitted), step))
    return rows


def bubble_only(tflops: float, stages: int, micro_batches: float, then: float) -> float:
    """TFLOP/s with `then` micro-batches instead, if the bubble is all that changes."""
    without = tflops * (1 + (stages - 1) / micro_batches)
    return without / (1 + (stages - 1) / then)
