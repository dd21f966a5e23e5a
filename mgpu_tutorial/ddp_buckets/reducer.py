"""Look into the Reducer of torch's DDP: what it sends, when, and in which bucket.

A communication hook is called with each bucket in place of DDP's own all_reduce; here it
notes what it was given and then makes that same all_reduce.
"""

import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.experiments import Tower, network, traced_steps

Buckets = list[list[str]]  # the names of the parameters in each bucket, in order of sending


def watch(model: DistributedDataParallel) -> list[Buckets]:
    """Note the buckets of every later iteration in the list that is returned."""
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    iterations: list[Buckets] = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if bucket.index() == 0:
            iterations.append([])
        iterations[-1].append([names[p] for p in bucket.parameters()])
        flat = bucket.buffer().div_(dist.get_world_size())
        done = dist.all_reduce(flat, async_op=True).get_future()
        return done.then(lambda _: flat)

    model.register_comm_hook(None, hook)
    return iterations


def in_mib(iterations: list[Buckets], module: nn.Module) -> list[str]:
    """The sizes of the buckets of each iteration in words, such as "1.0 + 5.0"."""
    mib = {name: p.nbytes / 2**20 for name, p in module.named_parameters()}
    return [
        " + ".join(f"{sum(mib[name] for name in bucket):.1f}" for bucket in buckets)
        for buckets in iterations
    ]


def observed(
    rank: int,
    world_size: int,
    width: int = 256,
    depth: int = 6,
    batch: int = 32,
    pause: float = 0.0,
    link: tuple[float, float] | None = None,
    iterations: int = 3,
    **options,
) -> list[Buckets]:
    """Run some iterations of DDP(Tower, **options); returns the buckets of each."""
    model = DistributedDataParallel(Tower(width, depth, pause), **options)
    seen = watch(model)
    with network(world_size, link):
        traced_steps(model, torch.randn(batch, width), iterations)
    return seen


def pretended(
    rank: int, world_size: int, ranks: int, **options
) -> tuple[list[Buckets], float]:
    """One process takes itself for rank 0 of `ranks`: a "fake" group sends nothing.

    Returns the buckets of each iteration, and by what a gradient was divided.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    seen = observed(0, ranks, **options)
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))
    watch(model)  # a fake all_reduce has no result of its own: the hook gives the bucket
    model(torch.ones(1, 1)).sum().backward()
    return seen, 1 / model.module.weight.grad.item()


def own_memory(rank: int, world_size: int, gradient_as_bucket_view: bool) -> bool:
    """Whether gradients have memory of their own beside the bucket that they travel in."""
    model = DistributedDataParallel(Tower(), gradient_as_bucket_view=gradient_as_bucket_view)
    places = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        flat = bucket.buffer()
        places.append((flat.data_ptr(), flat.data_ptr() + flat.nbytes))
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, hook)
    model(torch.randn(4, 64)).sum().backward()
    gradients = [p.grad.data_ptr() for p in model.parameters()]
    return not all(any(a <= g < b for a, b in places) for g in gradients)


def logged(rank: int, world_size: int, bucket_cap_mb: float = 1.0, steps: int = 5) -> dict:
    """What DDP writes down about itself, after some steps with a Tower of 6 MiB."""
    model = DistributedDataParallel(Tower(512, 6), bucket_cap_mb=bucket_cap_mb)
    inputs = torch.randn(64, 512)
    for _ in range(steps):
        model.zero_grad()
        model(inputs).square().mean().backward()
    return model._get_ddp_logging_data()


def cap_times(
    rank: int,
    world_size: int,
    caps: list[float],
    link: tuple[float, float],
    depth: int = 16,
    pause: float = 4e-3,
    steps: int = 2,
) -> dict[float, float]:
    """The shortest step, in seconds, with each bucket size, over a link that we set.

    The Tower has `depth` layers of 257 KiB; the backward of each takes `pause` seconds.
    """
    times: dict[float, float] = {}
    inputs = torch.randn(4, 256)
    with network(world_size, link):
        for cap in caps:
            model = DistributedDataParallel(Tower(256, depth, pause), bucket_cap_mb=cap)
            model.register_comm_hook(None, allreduce_hook)
            seconds = []
            for _ in range(1 + steps):  # buckets are rebuilt after the first
                model.zero_grad()
                dist.barrier()
                begin = time.perf_counter()
                model(inputs).square().mean().backward()
                seconds.append(time.perf_counter() - begin)
            times[cap] = min(seconds[1:])
    return times
