"""Communication hooks: what travels in place of a bucket, and what it does to the loss."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.nn.functional import nll_loss
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.data_partitioning import global_batches
from mgpu_tutorial.lab import progress, span
from mgpu_tutorial.shared.data import digits


def as_bfloat16(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The ranks average a bucket in bfloat16: half the bytes, and the range of float32.

    What torch.distributed brings as `bf16_compress_hook`.
    """
    flat = bucket.buffer()
    small = flat.to(torch.bfloat16).div_(dist.get_world_size())
    done = dist.all_reduce(small, async_op=True).get_future()
    return done.then(lambda _: flat.copy_(small))


def eight_bits(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The ranks average a bucket in whole numbers of one byte, after they agree on a scale.

    Each number is at most 127 // N, so that the sum over N ranks still fits into a byte.
    """
    flat, ranks = bucket.buffer(), dist.get_world_size()
    # the scale: what a unit of the whole numbers stands for, equal on all ranks
    largest = flat.abs().max().view(1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    unit = largest.clamp_min(1e-30) / (127 // ranks)
    # the numbers themselves
    small = (flat / unit).round().to(torch.int8)
    done = dist.all_reduce(small, async_op=True).get_future()
    return done.then(lambda _: flat.copy_(small).mul_(unit / ranks))


def power_sgd(model: DistributedDataParallel) -> None:
    """Register PowerSGD of rank 1 from the third step on; each rank keeps what it leaves out.

    From the paper of Vogels, Karimireddy and Jaggi, https://arxiv.org/abs/1905.13727.
    """
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def stateless(hook: Hook) -> Callable[[DistributedDataParallel], None]:
    """What registers a hook that keeps nothing from step to step."""
    return lambda model: model.register_comm_hook(None, hook)


HOOKS = {
    "float32": stateless(allreduce_hook),
    "float16": stateless(fp16_compress_hook),
    "bfloat16": stateless(as_bfloat16),
    "eight bits": stateless(eight_bits),
    "PowerSGD": power_sgd,
}


def digit_net() -> nn.Module:
    """A network with one hidden layer for images (N, 1, 28, 28): 50 890 parameters."""
    layers = [nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers, nn.LogSoftmax(dim=1))


def train_with_each_hook(
    rank: int, world_size: int, hooks: list[str], steps: int = 36, batch: int = 120
) -> dict[str, list[float]]:
    """The ranks train once with each of the HOOKS named; returns this rank's losses.

    All start alike and see the same batches of `batch` digits. The last step of each is
    inside a span with the name of the hook.
    """
    data = digits()
    losses: dict[str, list[float]] = {}
    for name in progress(hooks):
        torch.manual_seed(0)
        model = DistributedDataParallel(digit_net())
        HOOKS[name](model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
        losses[name] = []
        for step in range(steps):
            epoch, i = divmod(step, len(data) // batch)
            mine = global_batches(rank, world_size, len(data), batch, 1, epoch)[i]
            with span(name if step == steps - 1 else "before"):
                optimizer.zero_grad()
                loss = nll_loss(model(data.images[mine]), data.labels[mine])
                loss.backward()
                optimizer.step()
            losses[name].append(loss.item())
    return losses


def average_under_another_name(rank: int, world_size: int) -> float:
    """The ranks average their gradients 1, 2, ... with torch's own hook for bfloat16."""

    def wrapper(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return bf16_compress_hook(state, bucket)

    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model.register_comm_hook(None, wrapper)
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    return model.module.weight.grad.item()
