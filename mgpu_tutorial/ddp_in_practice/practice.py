"""Around the training loop: accumulation, and the trace of a step."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from mgpu_tutorial.ddp_buckets.experiments import Tower, shares
from mgpu_tutorial.ddp_reducer.reducer import note_buckets
from mgpu_tutorial.lab import Ledger


def accumulate(model: DistributedDataParallel, parts: Sequence[torch.Tensor]) -> None:
    """Backward on one part after the other; the ranks average once, in the last."""
    sizes = [len(part) for part in parts]
    if not sizes or len(set(sizes)) > 1 or 0 in sizes:
        raise ValueError(
            f"parts of {sizes} samples: the mean of their means is the mean of the batch "
            "only if there are parts, all of one size"
        )
    *first, last = parts
    with model.no_sync():
        for part in first:
            (model(part).square().mean() / len(parts)).backward()
    (model(last).square().mean() / len(parts)).backward()


def step_in_parts(rank: int, world_size: int, method: Callable, micro: int) -> dict[str, Any]:
    """The ranks take a step on their shares of 24 samples, in `micro` parts, by `method`.

    Returns how many buckets DDP sent, the most bytes that autograd kept, and the gradients.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(Tower(512, 6), bucket_cap_mb=1)
    iterations = note_buckets(model)
    (batch,) = shares(rank, world_size, 1, width=512)
    for _ in range(2):  # the buckets are rebuilt after the first
        iterations.clear()
        model.zero_grad()
        ledger = Ledger()
        ledger.add("the rest", [batch, *model.parameters()])  # is not counted below
        with ledger.saved_for_backward():
            method(model, batch.tensor_split(micro))
    gradients = [p.grad for p in model.parameters()]
    calls = sum(len(buckets) for buckets in iterations)
    kept = ledger.saved_peak(batch.device)
    return {"calls": calls, "kept": kept, "gradients": gradients}


def profile_step(rank: int, world_size: int, folder: str, late: float = 0.0) -> None:
    """The ranks profile their fourth step into `folder`; rank 1 is `late` seconds late."""
    if late < 0 or (late and world_size == 1):
        raise ValueError(f"there is no rank 1 of {world_size} that can be {late} s late")
    model = DistributedDataParallel(Tower(512, 6), bucket_cap_mb=1)
    inputs = torch.randn(256, 512)

    def step() -> None:
        model.zero_grad()
        model(inputs).square().mean().backward()

    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        dist.barrier()  # a profiler takes its time to start, and not the same on all ranks
        if rank == 1:
            time.sleep(late)
        step()
    seen.export_chrome_trace(f"{folder}/rank{rank}.json")


def read_trace(folder: str, rank: int, name: str) -> list[tuple[float, float]]:
    """From when to when operations whose name begins so ran, in ms, by a rank's trace."""
    text = Path(folder, f"rank{rank}.json").read_text(encoding="utf-8")
    return [
        (event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)
        for event in json.loads(text)["traceEvents"]
        if event["ph"] == "X" and event["name"].startswith(name)  # X: has a duration
    ]


def union_length(intervals: list[tuple[float, float]]) -> float:
    """For how long at least one of these intervals runs."""
    total, covered = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        if end < begin:
            raise ValueError(f"an interval ends at {end}, before it begins at {begin}")
        if end > covered:
            total += end - max(begin, covered)
            covered = end
    return total
