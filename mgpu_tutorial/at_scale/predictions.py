"""The published steps by the cost model: fit on the rows that are named, predict the rest."""

from collections.abc import Sequence
from typing import NamedTuple

from mgpu_tutorial.at_scale.published import FAMILIES, Run
from mgpu_tutorial.shared.cost_model.fitting import fit_gpu
from mgpu_tutorial.shared.cost_model.machines import GPU
from mgpu_tutorial.shared.cost_model.step import PredictedStep, predict_step

# Whose fitted numbers a family without fitted rows takes: same program, same machine.
BORROWED = {"table 2": "table 1", "ZeRO-3": "table 1"}
TWO_NUMBERS = ("table 1", "table 5")  # the others have one fitted row


class Prediction(NamedTuple):
    """A row of the table: the published figure, ours in the same unit, and the step."""

    run: Run
    predicted: float
    step: PredictedStep

    @property
    def error(self) -> float:
        """Of the prediction, as a share of the published figure."""
        return self.predicted / self.run.published - 1


def gpu_of(family: str) -> GPU:
    """The GPU of a family, with the numbers that its fitted rows give."""
    runs = FAMILIES[BORROWED.get(family, family)]()
    measured = [run.measured() for run in runs if run.fitted]
    if family in TWO_NUMBERS or family in BORROWED:
        return fit_gpu(measured)
    return fit_gpu(measured, gpu_of("table 5").activation_passes)


def predict(family: str) -> list[Prediction]:
    """Every row of a family, the fitted ones too."""
    return predict_runs(FAMILIES[family](), gpu_of(family))


def predict_runs(runs: Sequence[Run], gpu: GPU) -> list[Prediction]:
    """A prediction for each of `runs`, with the numbers of this GPU."""
    rows = []
    for run in runs:
        cluster = run.cluster._replace(gpu=gpu)
        step = predict_step(run.model, cluster, run.plan, run.batch)
        rows.append(Prediction(run, run.in_unit(step.seconds), step))
    return rows


def bubble_only(tflops: float, stages: int, micro_batches: float, then: float) -> float:
    """TFLOP/s with `then` micro-batches instead, if the bubble is all that changes."""
    without = tflops * (1 + (stages - 1) / micro_batches)
    return without / (1 + (stages - 1) / then)
