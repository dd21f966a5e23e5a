"""Measures for the notebook on collectives; no lesson is in here."""

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from mgpu_tutorial.collectives.ring import naive_seconds, ring_seconds
from mgpu_tutorial.lab import Table

Method = Callable[[torch.Tensor], None]


def time_methods(
    rank: int, world_size: int, methods: list[Method], sizes: list[int], turns: int = 5
) -> dict[tuple[str, int], float]:
    """Time each method on each size (bytes), in turns; returns the least seconds.

    Other programs on this machine can only add to a time, so the least is the nearest.
    A turn has five measurements of a small size, where a disturbance weighs most.
    """
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(turns):  # outermost: a disturbance hits one turn of many sizes
        for size in (s for s in sizes for _ in range(max(1, min(5, 2**25 // s)))):
            for method in methods:
                tensor = torch.ones(size // 4)  # of float32, 4 bytes each
                dist.barrier()
                begin = time.perf_counter()
                method(tensor)
                dist.barrier()
                seconds = time.perf_counter() - begin
                times.setdefault((method.__name__, size), []).append(seconds)
    return {key: min(values) for key, values in times.items()}


def fit_alpha_beta(
    sizes: list[int], seconds: list[float], world_size: int
) -> tuple[float, float]:
    """Fit `ring_seconds` to measured times by least squares of the relative errors.

    `sizes` in bytes; returns alpha in seconds a message and beta in bytes a second.
    """
    steps = 2 * (world_size - 1)
    bytes_sent = torch.tensor([steps / world_size * size for size in sizes])
    design = torch.stack([torch.full_like(bytes_sent, steps), bytes_sent], dim=1).double()
    weights = 1 / torch.tensor(seconds).double()
    solution = torch.linalg.lstsq(
        design * weights[:, None], torch.ones(len(seconds), 1).double()
    ).solution
    alpha, per_byte = solution.flatten().tolist()
    return alpha, 1 / per_byte


def compare_with_model(
    sizes: list[int],
    ring: list[float],
    naive: list[float],
    gloo: list[float],
    world_size: int,
    alpha: float,
    beta: float,
) -> Table:
    """Set measured seconds against those of the model: a row for each size (bytes)."""
    rows = []
    for i, size in enumerate(sizes):
        ring_model = ring_seconds(size, world_size, alpha, beta)
        naive_model = naive_seconds(size, world_size, alpha, beta)
        ratios = naive[i] / ring[i], naive_model / ring_model, gloo[i] / ring[i]
        figures = [1e3 * ring[i], 1e3 * ring_model, *ratios]
        rows.append([f"{size >> 10:,} KiB", *(f"{figure:.2f}" for figure in figures)])
    header = ["ring ms", "predicted", "naive / ring", "predicted", "gloo / ring"]
    return Table(["", *header], rows)
