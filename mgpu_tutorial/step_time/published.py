"""Steps that others have measured, and what the cost model says of them.

`published.json` has a line per step. What all rows of a family have in common stands in its
"all"; what stands nowhere is the default of `Model` and `Plan`. Each family names its source,
and what its table leaves out.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

from mgpu_tutorial.shared.cost_model.fitting import fit_gpu
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS, GPU, Cluster
from mgpu_tutorial.shared.cost_model.models import Model
from mgpu_tutorial.shared.cost_model.plans import Plan
from mgpu_tutorial.shared.cost_model.step import PredictedStep, hardware_flops, predict_step

TABLES = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))


class Run(NamedTuple):
    """A measured step: `published` in the `unit` that its authors use, per GPU.

    "hardware TFLOP/s" count what is computed again, "model TFLOP/s" do not, and with
    "causal" the attention is counted by half. `fitted` rows tell the GPU's numbers.
    """

    name: str
    model: Model
    cluster: Cluster
    plan: Plan
    batch: int
    published: float
    unit: str
    fitted: bool = False

    @property
    def seconds(self) -> float:
        """Of a step, as the published figure tells them."""
        if self.unit == "s":
            return self.published
        again, causal = "hardware" in self.unit, "causal" in self.unit
        flops = self.model.flops_per_token(again, causal) / 1e12
        tokens = self.batch * self.model.sequence / self.plan.ranks
        return tokens / self.published * (1 if self.unit == "tokens/s" else flops)

    @property
    def flops(self) -> float:
        """What one GPU computes in a step, with what it computes again."""
        tokens = self.batch * self.model.sequence / self.plan.ranks
        return tokens * hardware_flops(self.model, self.plan)


def runs_of(family: str) -> list[Run]:
    """The rows of a family."""
    runs = []
    for row in TABLES[family]["rows"]:
        row = TABLES[family]["all"] | row
        model, plan, others = (
            {name: row[name] for name in kind._fields if name in row}
            for kind in (Model, Plan, Run)
        )
        others |= {"model": Model(**model), "plan": Plan(**plan)}
        runs.append(Run(**others | {"cluster": CLUSTERS[row["cluster"]]}))
    return runs


def fitted_runs(family: str) -> list[Run]:
    """The rows that tell the numbers of this family's GPU.

    Families without one are of 2021: the same program on the same machine.
    """
    fitted = [run for run in runs_of(family) if run.fitted]
    return fitted or fitted_runs("Megatron 2021, table 1")


def gpu_of(family: str) -> GPU:
    """The GPU of a family: one row tells one number, and several rows tell both."""
    runs = fitted_runs(family)
    passes = gpu_of("Megatron 2022").activation_passes if len(runs) == 1 else None
    return fit_gpu(runs, passes)


class Prediction(NamedTuple):
    """A published row, the seconds of the null guess, and the step as we predict it.

    Errors are of the rate, whatever the authors' unit: above 0 we predict too fast a step.
    """

    run: Run
    null: float
    step: PredictedStep

    @property
    def error(self) -> float:
        """Of our prediction."""
        return self.run.seconds / self.step.seconds - 1

    @property
    def null_error(self) -> float:
        """Of the null guess."""
        return self.run.seconds / self.null - 1


def predict(family: str) -> list[Prediction]:
    """Every row of a family, the fitted ones too."""
    gpu, fitted, rows = gpu_of(family), fitted_runs(family), []
    for run in runs_of(family):
        cluster = run.cluster._replace(gpu=gpu)
        step = predict_step(run.model, cluster, run.plan, run.batch)
        rows.append(Prediction(run, null_seconds(run, fitted), step))
    return rows


def null_seconds(run: Run, fitted: list[Run]) -> float:
    """The null guess: the operations per second and GPU stay as in the fitted row.

    Of several fitted rows the one that recomputes alike, then the nearest number of GPUs.
    """

    def distance(row: Run) -> tuple[bool, float]:
        far = abs(math.log(row.plan.ranks / run.plan.ranks))
        return row.plan.recompute != run.plan.recompute, far

    row = min(fitted, key=distance)
    return row.seconds * run.flops / row.flops
