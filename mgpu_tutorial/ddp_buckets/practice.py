"""Around the training loop: accumulation, uneven inputs, unused parameters, checkpoints."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import mgpu_tutorial
from mgpu_tutorial.ddp_buckets.experiments import Tower, shares
from mgpu_tutorial.ddp_buckets.wrappers import (
    Wrapper,
    calling_from_python,
    finish_gradient_synchronization,
    wrap,
)
from mgpu_tutorial.lab import span


def accumulate_gradients(
    rank: int, world_size: int, wrapper: Wrapper, micro: int = 3
) -> list[list[torch.Tensor]]:
    """Gradients of one batch in `micro` parts: all synchronise, then only the last does."""
    torch.manual_seed(0)
    model = calling_from_python(wrap(wrapper, Tower(), bucket_cap_mb=0.02))
    (batch,) = shares(rank, world_size, 1, width=64)
    found = []
    for name in ("warm up", "every backward", "last backward"):
        model.zero_grad()
        with span(name):
            for i, part in enumerate(batch.chunk(micro)):
                synchronise = name != "last backward" or i == micro - 1
                with nullcontext() if synchronise else model.no_sync():
                    (model(part).square().mean() / micro).backward()
                    if synchronise:
                        finish_gradient_synchronization(model)
        found.append([p.grad.clone() for p in model.parameters()])
    return found[1:]


def train_on_uneven_batches(rank: int, world_size: int, join: bool) -> int:
    """Rank r has 5 - 2 r batches; inside join() a rank without any answers the others."""
    model = DistributedDataParallel(Tower())
    batches = [torch.randn(4, 64) for _ in range(5 - 2 * rank)]
    with model.join() if join else nullcontext():
        for batch in batches:
            model(batch).square().mean().backward()
    return len(batches)


class TwoHeads(nn.Module):
    """Two heads, of which a forward uses the first, and both with `everything`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, everything: bool = False) -> torch.Tensor:
        return self.first(x) + (0 * self.second(x) if everything else 0)


def leave_a_head_unused(
    rank: int, world_size: int, everything: bool = False, **options: Any
) -> tuple[float, float | None]:
    """Two steps of DDP(TwoHeads(), **options); returns a gradient of each head."""
    model = DistributedDataParallel(TwoHeads(), **options)
    first, second = model.module.first.bias, model.module.second.bias
    for step in range(2):
        model.zero_grad()
        output = model(torch.ones(2, 4), everything)
        print(f"forward {step} done")
        (output.sum() * (1 + rank)).backward()
        print(f"backward {step} done: gradient {first.grad.item()}")
    return first.grad.item(), None if second.grad is None else second.grad.item()


def follow_the_running_mean(rank: int, world_size: int) -> list[float]:
    """The running mean of a BatchNorm after each of two forwards of 10, 20, … by rank."""
    model = DistributedDataParallel(nn.BatchNorm1d(1))
    means = []
    for _ in range(2):
        model(torch.full((4, 1), 10.0 * (rank + 1)))
        means.append(round(model.module.running_mean.item(), 4))
    return means


def synchronise_batch_norm(rank: int, world_size: int) -> None:
    """Every BatchNorm becomes a SyncBatchNorm, whose forward sums over the ranks."""
    module = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(1))
    DistributedDataParallel(module)(torch.ones(4, 1))


def save_and_load(rank: int, world_size: int, folder: str) -> list[str]:
    """Rank 0 saves, all wait, load, and wrap what they loaded; returns the file's keys."""
    path = Path(folder, "checkpoint.pt")
    model = DistributedDataParallel(nn.Linear(2, 1))
    if rank == 0:
        torch.save(model.module.state_dict(), path)
    dist.barrier()  # nobody reads before the file is whole
    state = torch.load(path, map_location="cpu")
    torch.manual_seed(1)
    fresh = nn.Linear(2, 1)
    fresh.load_state_dict(state)  # before it is wrapped
    again = DistributedDataParallel(fresh)
    assert torch.equal(again.module.weight, model.module.weight)
    return list(state)


def profile_step(
    rank: int, world_size: int, folder: str
) -> tuple[list[dict], dict[str, int]]:
    """Profile the fourth step of DDP; returns the trace's intervals, and how often each came.

    The trace is written to `folder`, a file for each rank, for https://ui.perfetto.dev.
    """
    model = DistributedDataParallel(Tower(512, 6), bucket_cap_mb=1)
    inputs = torch.randn(128, 512)
    for step in range(4):
        model.zero_grad()
        last = step == 3
        with profile(activities=[ProfilerActivity.CPU]) if last else nullcontext() as seen:
            model(inputs).square().mean().backward()
    path = Path(folder, f"rank{rank}.json")
    seen.export_chrome_trace(str(path))
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    intervals = [e for e in events if e.get("ph") == "X" and e["cat"] != "Trace"]
    return intervals, {average.key: average.count for average in seen.key_averages()}


def whoami(device: torch.device) -> str:
    """This process in one line: PID, the most memory it has had, its device."""
    import resource  # not on Windows

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    mib = most / 2**20 if sys.platform == "darwin" else most / 2**10
    return f"PID {os.getpid()}, {mib:.0f} MiB, {device}"


def run_torchrun(module: str, processes: int, gpus: str, folder: str) -> list[str]:
    """The lines that `torchrun -m module` prints, one from each of its ranks, sorted.

    It runs in `folder` with CUDA_VISIBLE_DEVICES=gpus. The ranks print in any order. Raises
    RuntimeError with torchrun's own message where it fails, and TimeoutExpired after 100 s.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run"]  # what `torchrun` is short for
    options = ["--standalone", "--nproc-per-node", str(processes), "--log-dir", folder]
    package = str(Path(mgpu_tutorial.__file__).parents[1])
    done = subprocess.run(
        [*torchrun, *options, "-m", module],
        cwd=folder,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": gpus, "PYTHONPATH": package},
        capture_output=True,
        text=True,
        timeout=100,
    )
    if done.returncode:
        raise RuntimeError(f"torchrun ended with exit code {done.returncode}:\n{done.stderr}")
    return sorted(done.stdout.splitlines())


def wrap_different_modules(
    rank: int, world_size: int, wrapper: Wrapper, width: int, depth: int
) -> None:
    """Rank r wraps a Tower that is r * `width` wider and r * `depth` deeper than rank 0's."""
    wrap(wrapper, Tower(64 + rank * width, 4 + rank * depth))


def die_in_backward(rank: int, world_size: int, wrapper: Wrapper) -> None:
    """Rank 1 ends in the middle of backward, when its first layer's gradient is computed."""
    model = wrap(wrapper, Tower())
    if rank == 1:
        model.module.body[0].weight.register_hook(lambda gradient: os._exit(1))
    model(torch.randn(4, 64)).sum().backward()
    finish_gradient_synchronization(model)
