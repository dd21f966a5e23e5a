"""The two numbers of a GPU, from measured steps."""

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch

from mgpu_tutorial.shared.cost_model.machines import GPU, Cluster
from mgpu_tutorial.shared.cost_model.models import Model
from mgpu_tutorial.shared.cost_model.plans import Plan
from mgpu_tutorial.shared.cost_model.step import predict_step


class MeasuredStep(NamedTuple):
    """A step that was measured: what ran, and its `seconds`."""

    model: Model
    cluster: Cluster
    plan: Plan
    batch: int
    seconds: float


def fit_gpu(runs: Sequence[MeasuredStep], activation_passes: float | None = None) -> GPU:
    """The GPU of the first run, with the two numbers that fit these runs best.

    The fit minimises the squares of the relative errors. A step's seconds are linear in
    `activation_passes` and in 1 / `matmul_efficiency`, apart from what runs under compute,
    so a few rounds of a linear fit find both. With `activation_passes` given, only the
    efficiency is fitted. Raises ValueError for fewer runs than numbers to fit, and warns
    where the GPU would have to beat its data sheet.
    """
    free = [0, 1] if activation_passes is None else [0]
    if len(runs) < len(free):
        raise ValueError(f"{len(runs)} runs are too few to fit {len(free)} numbers")

    def gpu_at(numbers: torch.Tensor) -> GPU:
        slowness, passes = numbers.tolist()
        gpu = runs[0].cluster.gpu
        return gpu._replace(matmul_efficiency=1 / slowness, activation_passes=passes)

    def ratios(numbers: torch.Tensor) -> torch.Tensor:
        """Predicted over measured seconds of each run."""
        found = []
        for run in runs:
            cluster = run.cluster._replace(gpu=gpu_at(numbers))
            step = predict_step(run.model, cluster, run.plan, run.batch)
            found.append(step.seconds / run.seconds)
        return torch.tensor(found, dtype=torch.float64)

    at = torch.tensor([1.3, activation_passes or 3.0], dtype=torch.float64)
    for _ in range(20):
        now, slopes = ratios(at), []
        for column in free:
            moved = at.clone()
            moved[column] *= 1.001
            slopes.append((ratios(moved) - now) / (moved[column] - at[column]))
        change = torch.linalg.lstsq(torch.stack(slopes, 1), (1 - now)[:, None]).solution
        at[free] += change.flatten()
    gpu = gpu_at(at)
    if gpu.matmul_efficiency > 1:
        warnings.warn(
            f"the fit says {gpu.matmul_efficiency:.0%} of the peak: more than the data sheet "
            "allows, so plan, batch or recomputation are not those of the measured step",
            stacklevel=2,
        )
    return gpu
