"""The two numbers of a GPU, from measured steps."""

from collections.abc import Sequence
from typing import NamedTuple

from mgpu_tutorial.shared.cost_model.machines import GPU, Cluster
from mgpu_tutorial.shared.cost_model.models import Model
from mgpu_tutorial.shared.cost_model.plans import Plan
from mgpu_tutorial.shared.cost_model.step import predict_step


class Measured(NamedTuple):
    """A step that was measured: what ran, and its `seconds`."""

    model: Model
    cluster: Cluster
    plan: Plan
    batch: int
    seconds: float


def fit_gpu(runs: Sequence[Measured], traffic: float | None = None) -> GPU:
    """The GPU of the first run with `matmul_share` and `traffic` as these runs tell them.

    By least squares of the relative errors. A step's seconds are linear in `traffic` and in
    1 / `matmul_share` but for what runs under compute, so a few turns of a linear fit find
    them. With `traffic` given, only the share is fitted. Raises ValueError for no runs, and
    for a single one without `traffic`.
    """
    import torch

    if len(runs) < (2 if traffic is None else 1):
        raise ValueError(f"{len(runs)} runs are too few for what is to be fitted")
    at = torch.tensor([1.3, 3.0 if traffic is None else traffic], dtype=torch.float64)
    free = [0, 1] if traffic is None else [0]
    for _ in range(20):
        ratios = _ratios(runs, at)
        slopes = []
        for column in free:
            moved = at.clone()
            moved[column] *= 1.001
            slopes.append((_ratios(runs, moved) - ratios) / (moved[column] - at[column]))
        change = torch.linalg.lstsq(torch.stack(slopes, 1), (1 - ratios)[:, None]).solution
        at[free] += change.flatten()
    share, passes = 1 / at[0].item(), at[1].item()
    return runs[0].cluster.gpu._replace(matmul_share=share, traffic=passes)


def _ratios(runs: Sequence[Measured], at: "torch.Tensor") -> "torch.Tensor":  # noqa: F821
    """Predicted over measured seconds of each run, with these two numbers."""
    import torch

    found = []
    for run in runs:
        gpu = run.cluster.gpu._replace(matmul_share=1 / at[0].item(), traffic=at[1].item())
        step = predict_step(run.model, run.cluster._replace(gpu=gpu), run.plan, run.batch)
        found.append(step.seconds / run.seconds)
    return torch.tensor(found, dtype=torch.float64)
