"""Look into the Reducer of torch's DDP: what it sends, when, and in which bucket.

A communication hook is called with each bucket in place of DDP's own all_reduce; here it
notes what it was given and then makes that same all_reduce.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.experiments import Setting, Tower, trace_steps
from mgpu_tutorial.lab import borrowed

Buckets = list[list[str]]  # the names of the parameters in each bucket, in order of sending


def note_buckets(model: DistributedDataParallel) -> list[Buckets]:
    """Note the buckets of every later iteration in the list that is returned."""
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    iterations: list[Buckets] = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            iterations.append([])
        iterations[-1].append([names[p] for p in bucket.parameters()])
        # then what DDP does without a hook: divide, and add up over the ranks
        flat = bucket.buffer().div_(dist.get_world_size())
        done = dist.all_reduce(flat, async_op=True).get_future()
        return done.then(lambda _: flat)

    model.register_comm_hook(None, hook)
    return iterations


def sizes_in_mib(iterations: list[Buckets], module: nn.Module) -> list[str]:
    """The sizes of the buckets of each iteration in words, such as "1.0 + 5.0"."""
    mib = {name: p.nbytes / 2**20 for name, p in module.named_parameters()}
    return [
        " + ".join(f"{sum(mib[name] for name in bucket):.1f}" for bucket in buckets)
        for buckets in iterations
    ]


def observe_buckets(
    rank: int, world_size: int, setting: Setting, iterations: int = 3, **options: Any
) -> list[Buckets]:
    """The ranks take some steps with DDP(…, **options); returns the buckets of each."""
    if setting.bucket_cap_mb is not None:
        options = {"bucket_cap_mb": setting.bucket_cap_mb} | options
    model = DistributedDataParallel(setting.tower(), **options)
    seen = note_buckets(model)
    with setting.network(world_size):
        trace_steps(model, setting.inputs(), iterations)
    return seen


def pretend_world(
    rank: int, world_size: int, ranks: int, setting: Setting
) -> tuple[list[Buckets], float]:
    """One process takes itself for rank 0 of `ranks`: a "fake" group sends nothing.

    Returns the buckets of each iteration, and by what a gradient was divided.
    """
    dist.init_process_group("fake", store=borrowed.fake_store(), rank=0, world_size=ranks)
    seen = observe_buckets(0, ranks, setting)
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    note_buckets(model)  # a fake all_reduce has no result: our hook returns the bucket
    model(torch.ones(1, 1)).sum().backward()
    return seen, 1 / model.module.weight.grad.item()


def compare_addresses(rank: int, world_size: int, gradient_as_bucket_view: bool) -> bool:
    """Whether gradients have memory of their own beside the bucket that they travel in."""
    model = DistributedDataParallel(Tower(), gradient_as_bucket_view=gradient_as_bucket_view)
    buckets = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        flat = bucket.buffer()
        buckets.append(range(flat.data_ptr(), flat.data_ptr() + flat.nbytes))
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, hook)
    model(torch.randn(4, 64)).sum().backward()
    gradients = [p.grad.data_ptr() for p in model.parameters()]
    return not all(any(address in bucket for bucket in buckets) for address in gradients)


def read_ddp_log(
    rank: int, world_size: int, setting: Setting, steps: int = 5
) -> dict[str, Any]:
    """What DDP writes down about itself while the ranks take some steps; times in ns."""
    model = DistributedDataParallel(setting.tower(), bucket_cap_mb=setting.bucket_cap_mb)
    inputs = setting.inputs()
    for _ in range(steps):
        model.zero_grad()
        model(inputs).square().mean().backward()
    return borrowed.ddp_logging_data(model)
