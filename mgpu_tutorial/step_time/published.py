"""Steps that others have measured, with a complete plan: `published.json`, row by row.

Each family names its source, and what its table leaves out.
"""

import json
from pathlib import Path
from typing import NamedTuple

from mgpu_tutorial.shared.cost_model.fitting import MeasuredStep
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS, Cluster
from mgpu_tutorial.shared.cost_model.models import Model
from mgpu_tutorial.shared.cost_model.plans import Plan

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
    fitted: bool

    @property
    def seconds(self) -> float:
        """Of a step, as the published figure tells them."""
        if self.unit == "s":
            return self.published
        tokens = self.batch * self.model.sequence / self.plan.ranks
        return tokens / self.published * flops_behind(self.unit, self.model) / 1e12

    def in_unit(self, seconds: float) -> float:
        """What the authors would have printed for a step of so many seconds."""
        if self.unit == "s":
            return seconds
        return self.published * self.seconds / seconds

    def measured(self) -> MeasuredStep:
        """The row as `fit_gpu` takes it."""
        return MeasuredStep(self.model, self.cluster, self.plan, self.batch, self.seconds)


def flops_behind(unit: str, model: Model) -> float:
    """What stands for one token in a unit, times 10^12: its operations, or one token."""
    if unit == "tokens/s":
        return 1e12
    return model.flops_per_token(recompute="hardware" in unit, causal="causal" in unit)


def runs_of(family: str) -> list[Run]:
    """The rows of a family; what a row does not name is the default of model and plan."""
    runs = []
    for row in TABLES[family]["rows"]:
        model, plan = Model(**row["model"]), Plan(**row["plan"])
        cluster = CLUSTERS[row["cluster"]]
        runs.append(Run(**row | {"model": model, "plan": plan, "cluster": cluster}))
    return runs
