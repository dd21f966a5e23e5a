"""Steps that others have measured, the fit to some of them, and our predictions.

`published.json` has a line per step, and under "all" what a family's rows have in common.
Families that are "held_out" were added when the formula was finished.
"""

import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from mgpu_tutorial.shared.cost_model.machines import CLUSTERS, GPU, Cluster
from mgpu_tutorial.shared.cost_model.plans import Model, Plan
from mgpu_tutorial.shared.cost_model.step import PredictedStep, hardware_flops, step_on
from mgpu_tutorial.shared.guards import one_of

TABLES = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))

HELD_OUT = [family for family, table in TABLES.items() if table.get("held_out")]

UNITS = ["s", "tokens/s", "hardware TFLOP/s", "model TFLOP/s"]
UNITS += [f"{unit}, causal" for unit in UNITS[2:]]


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
    unit: str = "s"
    fitted: bool = False

    @property
    def seconds(self) -> float:
        """Of a step, as the published figure tells them."""
        one_of("unit", self.unit, UNITS)
        if self.unit == "s":
            return self.published
        flops = self.model.flops_per_token("hardware" in self.unit, "causal" in self.unit)
        tokens = self.batch * self.model.sequence / self.plan.ranks
        return tokens / self.published * (1 if self.unit == "tokens/s" else flops / 1e12)

    @property
    def flops(self) -> float:
        """What one GPU computes in a step, with what it computes again."""
        tokens = self.batch * self.model.sequence / self.plan.ranks
        return tokens * hardware_flops(self.model, self.plan)

    def predicted(self, gpu: GPU) -> PredictedStep:
        """The same step on such a GPU, as the cost model has it."""
        return step_on(self.model, self.cluster._replace(gpu=gpu), self.plan, self.batch)


def runs_of(family: str) -> list[Run]:
    """The rows of a family."""
    one_of("family", family, TABLES)
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
    """The rows that tell the numbers of this family's GPU, its own or another family's."""
    fitted = [run for run in runs_of(family) if run.fitted]
    return fitted or fitted_runs(TABLES[family]["numbers_of"])


def gpu_of(family: str) -> GPU:
    """The GPU of a family: one row tells one number, and several rows tell both."""
    runs = fitted_runs(family)
    passes = gpu_of("Megatron 2022").activation_passes if len(runs) == 1 else None
    return fit_gpu(runs, passes)


def fit_gpu(runs: Sequence[Run], activation_passes: float | None = None) -> GPU:
    """The GPU of the first run, with the two numbers that fit these runs best.

    A step's seconds are nearly linear in `activation_passes` and in 1 / `matmul_efficiency`,
    so a few rounds of least squares of the relative errors find both, or, with
    `activation_passes` given, the efficiency. Raises ValueError for fewer runs than numbers;
    the same run twice is one.
    """
    free = 2 if activation_passes is None else 1
    if len(set(runs)) < free:
        raise ValueError(f"{len(set(runs))} runs are too few to fit {free} numbers")

    def gpu_at(numbers: torch.Tensor) -> GPU:
        slowness, passes = numbers.tolist()
        return GPU(*runs[0].cluster.gpu[:-2], 1 / slowness, passes)

    def ratios(numbers: torch.Tensor) -> torch.Tensor:
        """Predicted over measured seconds of each run."""
        gpu = gpu_at(numbers)
        return numbers.new_tensor([r.predicted(gpu).seconds / r.seconds for r in runs])

    passes = 3.0 if activation_passes is None else activation_passes
    at = torch.tensor([1.3, passes], dtype=torch.float64)
    for _ in range(20):
        now, steps = ratios(at), torch.diag(0.001 * at)[:free]
        slopes = [(ratios(at + step) - now) / step.sum() for step in steps]
        change = torch.linalg.lstsq(torch.stack(slopes, 1), (1 - now)[:, None]).solution
        at[:free] += change.flatten()
    gpu = gpu_at(at)
    if not 0 < gpu.matmul_efficiency <= 1 or gpu.activation_passes < 0:
        found = f"the fit says {gpu.matmul_efficiency:.0%} of the peak and "
        found += f"{gpu.activation_passes:.2f} passes, more than the data sheet allows, "
        why = "or less than none: is this the plan of the measured step?"
        warnings.warn(found + why, stacklevel=2)
    return gpu


CHANGES = ["GPUs, batch or pipeline", "width or TP", "recomputation", "longer sequences"]
CHANGES += ["experts", "another program"]


def change(family: str, run: Run) -> str:
    """What most sets a row apart from the fitted ones: one of `CHANGES`, the last of them.

    "longer" means twice as long as any fitted row, or more.
    """
    fitted = fitted_runs(family)
    longest = max(row.model.sequence for row in fitted)
    again = [row for row in fitted if row.plan.recompute == run.plan.recompute]
    shapes = [(row.model.hidden, row.plan.tp) for row in (run, *again)]
    holds = [True, shapes[0] not in shapes[1:], not again, run.model.sequence >= 2 * longest]
    holds += [run.model.experts > 1, TABLES[family].get("another_program", False)]
    return [name for name, is_so in zip(CHANGES, holds, strict=True) if is_so][-1]


class Prediction(NamedTuple):
    """A published run, the step as we predict it, our error and that of the null guess.

    Errors are of the seconds: below 0 the prediction is too fast.
    """

    run: Run
    step: PredictedStep
    error: float
    null_error: float


def predict(family: str) -> list[Prediction]:
    """Every run of a family, the fitted ones too, on a GPU as those tell it."""
    gpu, fitted, rows = gpu_of(family), fitted_runs(family), []
    for run in runs_of(family):
        step = run.predicted(gpu)
        guesses = step.seconds, null_seconds(run, fitted)
        errors = [seconds / run.seconds - 1 for seconds in guesses]
        rows.append(Prediction(run, step, *errors))
    return rows


def null_seconds(run: Run, fitted: list[Run]) -> float:
    """The null guess: the operations per second and GPU stay as in the fitted row.

    Of several fitted rows one that recomputes alike, with the nearest number of GPUs.
    """
    alike = [row for row in fitted if row.plan.recompute == run.plan.recompute] or fitted
    row = min(alike, key=lambda row: abs(math.log(row.plan.ranks / run.plan.ranks)))
    return row.seconds * run.flops / row.flops
