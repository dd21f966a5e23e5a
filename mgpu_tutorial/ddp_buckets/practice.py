"""Around the training loop: accumulation, uneven inputs, unused parameters, checkpoints."""

import copy
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from mgpu_tutorial.ddp_buckets.experiments import Tower, finish, shares, wrap
from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP
from mgpu_tutorial.lab import span


def accumulated(
    rank: int, world_size: int, way: Callable, micro: int = 3
) -> list[list[torch.Tensor]]:
    """Gradients of one batch in `micro` parts: all synchronise, then only the last does."""
    torch.manual_seed(0)
    model = wrap(way, Tower(), bucket_cap_mb=0.02, from_python=True)
    (batch,) = shares(rank, world_size, 1, width=64)
    found = []
    for name in ("warm up", "every backward", "last backward"):
        model.zero_grad()
        with span(name):
            for i, part in enumerate(batch.chunk(micro)):
                last = name != "last backward" or i == micro - 1
                with nullcontext() if last else model.no_sync():
                    (model(part).square().mean() / micro).backward()
                    if last:
                        finish(model)
        found.append([p.grad.clone() for p in model.parameters()])
    return found[1:]


def uneven(rank: int, world_size: int, join: bool) -> int:
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


def unused(
    rank: int, world_size: int, everything: bool = False, **options
) -> tuple[float, float | None]:
    """Two steps with a head that is not used; returns a gradient of each head."""
    model = DistributedDataParallel(TwoHeads(), **options)
    first, second = model.module.first.bias, model.module.second.bias
    for step in range(2):
        model.zero_grad()
        output = model(torch.ones(2, 4), everything)
        print(f"forward {step} done")
        (output.sum() * (1 + rank)).backward()
        print(f"backward {step} done: gradient {first.grad.item()}")
    return first.grad.item(), None if second.grad is None else second.grad.item()


def statistics(rank: int, world_size: int) -> list[float]:
    """The running mean of a BatchNorm after each of two forwards of 10, 20, … by rank."""
    model = DistributedDataParallel(nn.BatchNorm1d(1))
    means = []
    for _ in range(2):
        model(torch.full((4, 1), 10.0 * (rank + 1)))
        means.append(round(model.module.running_mean.item(), 4))
    return means


def synchronised_norm(rank: int, world_size: int) -> None:
    """Every BatchNorm becomes a SyncBatchNorm, whose forward sums over the ranks."""
    module = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(1))
    DistributedDataParallel(module)(torch.ones(4, 1))


def saved_and_loaded(rank: int, world_size: int, folder: str) -> list[str]:
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


def profiled(rank: int, world_size: int, folder: str) -> tuple[list[dict], dict[str, int]]:
    """Profile one step of DDP; returns the trace's intervals, and how often each name came.

    The trace is written to `folder`, a file for each rank, for https://ui.perfetto.dev.
    """
    model = DistributedDataParallel(Tower(512, 6), bucket_cap_mb=1)
    inputs = torch.randn(128, 512)
    for step in range(4):
        model.zero_grad()
        on = step == 3
        with profile(activities=[ProfilerActivity.CPU]) if on else nullcontext() as seen:
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


def as_torchrun(rank: int, world_size: int, processes: int, gpus: str, script: str) -> None:
    """Run `script`.main under torchrun's agent: CUDA_VISIBLE_DEVICES=gpus torchrun …

    `torchrun` reads its command line and calls elastic_launch. We call that ourselves and
    let the ranks be forks of this process, which has torch imported already.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    with tempfile.TemporaryDirectory() as folder:
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            run_id="notebook",
            local_addr="localhost",
            start_method="fork",
            logs_specs=DefaultLogsSpecs(folder),
        )
        main = importlib.import_module(f"mgpu_tutorial.ddp_buckets.{script}").main
        elastic_launch(config, main)(folder, 1)  # one epoch


def different(rank: int, world_size: int, way: Callable, width: int, depth: int) -> None:
    """Rank r wraps a Tower that is r * `width` wider and r * `depth` deeper than rank 0's."""
    wrap(way, Tower(64 + rank * width, 4 + rank * depth))


def dies_in_backward(rank: int, world_size: int, way: Callable) -> None:
    """Rank 1 ends in the middle of backward, when its first layer's gradient is computed."""
    model = wrap(way, Tower())
    if rank == 1:
        model.module.body[0].weight.register_hook(lambda gradient: os._exit(1))
    model(torch.randn(4, 64)).sum().backward()
    finish(model)


class PlantedDDP(BucketedDDP):
    """BucketedDDP with a bug: some modules get gradients that are not the mean."""

    def _attach(self) -> None:
        for _, parameter in self.module.named_parameters(remove_duplicate=False):
            parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter: nn.Parameter) -> None:
        bucket = self.bucket_of[parameter]
        if self.synchronises and bucket.missing:
            bucket.missing.pop()  # one gradient less to wait for
            self.order[parameter] = None
            self._send_complete()


def tied_gradients_are_right(rank: int, world_size: int, way: Callable) -> bool:
    """Whether the mean gradients of a Tower with a tied weight equal those of one process.

    The last two layers share their weight. Whatever was sent has arrived before the last
    gradient of backward is added, as on a fast network.
    """
    torch.manual_seed(0)
    tower = Tower()
    tower.body[3].weight = tower.body[2].weight
    alone = copy.deepcopy(tower)
    model = wrap(way, tower)

    def last(gradient: torch.Tensor) -> None:
        for bucket in getattr(model, "buckets", []):
            if bucket.work:
                bucket.work.wait()

    tower.body[0].weight.register_hook(last)
    (mine,), (whole,) = shares(rank, world_size, 1, 64), shares(0, 1, 1, 64)
    model(mine).square().mean().backward()
    finish(model)
    alone(whole).square().mean().backward()
    pairs = zip(tower.parameters(), alone.parameters(), strict=True)
    return all(torch.allclose(p.grad, q.grad, atol=1e-7) for p, q in pairs)
