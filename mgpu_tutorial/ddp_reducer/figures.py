"""Apparatus, not the lesson: counts and draws what the hooks and the options do."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mgpu_tutorial.ddp_buckets.experiments import Tower
from mgpu_tutorial.ddp_reducer.reducer import Buckets, count_memory, observe_buckets
from mgpu_tutorial.lab import Table, curves, frame, launch
from mgpu_tutorial.lab.draw.plot import Plot


def tabulate_buckets(iterations: Sequence[Buckets], tower: Tower) -> Table:
    """A row for each bucket, in the order in which they leave: its size and what is in it."""
    kib = {name: p.nbytes / 2**10 for name, p in tower.named_parameters()}
    rows = [
        [f"{i}, bucket {b}", f"{sum(map(kib.get, bucket)):.0f}", ", ".join(bucket)]
        for i, buckets in enumerate(iterations, 1)
        for b, bucket in enumerate(buckets)
    ]
    return Table(["iteration", "KiB", "parameters"], rows)


def outcome_of(options: dict[str, Any]) -> dict[str, Any]:
    """The MiB of the second iteration's buckets, and the gradients' bytes beside them."""
    nbytes = launch(count_memory, 2, **options).results[0]
    _, second, _ = launch(observe_buckets, 2, 512, **options).results[0]
    mib = {name: p.nbytes / 2**20 for name, p in Tower(512, depth=6).named_parameters()}
    sizes = [f"{sum(map(mib.get, bucket)):.1f}" for bucket in second]
    return {"buckets": " + ".join(sizes), "bytes beside them": nbytes.get("gradients", 0)}


def loss_curves(losses: Mapping[str, list[float]]) -> Plot:
    """The loss of each step by the hook's name."""
    measured = {name: (range(len(values)), values) for name, values in losses.items()}
    return curves(measured, {}, "step", "loss", scale="linear")


THIRDS = [["head", "body.5", "body.4"], ["body.3", "body.2"], ["body.1", "body.0"]]


def follow_buckets(rank: int, world_size: int, seen: list[Buckets]) -> None:
    """Fill the buckets that `note_buckets` saw, two layers at a time, with a frame each."""
    for iteration, buckets in enumerate(seen[:2], 1):
        ready, sent = set(), 0
        count = f"{len(buckets)} bucket{'s' * (len(buckets) > 1)}"
        says = f"Iteration {iteration} begins, with {count}."
        for layers in ([], *THIRDS):
            ready |= {name for name in sum(buckets, []) if name.rpartition(".")[0] in layers}
            leaves = "nothing leaves"
            while sent < len(buckets) and ready.issuperset(buckets[sent]):
                dist.all_reduce(torch.zeros(1))
                leaves, sent = f"bucket {sent} leaves", sent + 1
            if layers:
                says = f"Iteration {iteration}: after {' and '.join(layers)} {leaves}."
            full = [f"{len(ready.intersection(b))} of {len(b)}" for b in buckets]
            states = ["sent"] * sent + full[sent:]
            frame(says, {f"bucket {i}": state for i, state in enumerate(states)})
