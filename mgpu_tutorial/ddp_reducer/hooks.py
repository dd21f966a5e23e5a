"""Communication hooks: what travels in place of a bucket, and what it does to the loss."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.nn.functional import nll_loss
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.data_partitioning import global_batches
from mgpu_tutorial.lab import span
from mgpu_tutorial.shared.data import digits

Product = tuple[torch.Tensor, torch.Tensor]  # a column, and the row beside it


def as_bfloat16(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The ranks average a bucket in bfloat16: half the bytes, and the range of float32."""
    flat = bucket.buffer()
    small = flat.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(small, async_op=True)
    # when the sum has arrived: back to float32, into the bucket
    return work.get_future().then(lambda done: flat.copy_(small))


def eight_bits(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The ranks average a bucket in whole numbers of one byte, after they agree on a scale.

    Each number is at most 127 // N, so that the sum over N ranks still fits into a byte.
    """
    flat = bucket.buffer()
    ranks = dist.get_world_size()
    # the scale: what a unit of the whole numbers stands for, equal on all ranks
    largest = flat.abs().max().view(1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    unit = largest.clamp_min(1e-30) / (127 // ranks)
    # the numbers themselves
    small = (flat / unit).round().to(torch.int8)
    work = dist.all_reduce(small, async_op=True)
    return work.get_future().then(lambda done: flat.copy_(small).mul_(unit / ranks))


def average_as_product(matrix: torch.Tensor, row: torch.Tensor) -> Product:
    """The ranks average (m, n) roughly, as a column (m,) times a row (n,); all know `row`."""
    column = matrix @ row
    dist.all_reduce(column)
    column = column / column.norm()
    # only now the row, because it is computed with the column that all ranks share
    row = matrix.T @ column
    dist.all_reduce(row, op=dist.ReduceOp.AVG)
    return column, row


def power_sgd(model: DistributedDataParallel, error_feedback: bool = True) -> None:
    """Register PowerSGD: from the third step on a weight's gradient travels as two vectors.

    With `error_feedback` each rank adds what it left out to its next gradient. From the
    paper of Vogels, Karimireddy and Jaggi, https://arxiv.org/abs/1905.13727.
    """
    state = powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=1,
        start_powerSGD_iter=2,
        use_error_feedback=error_feedback,
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def forgetful_power_sgd(model: DistributedDataParallel) -> None:
    """Register PowerSGD such that what it leaves out of a gradient is lost."""
    power_sgd(model, error_feedback=False)


Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def stateless(hook: Hook) -> Callable[[DistributedDataParallel], None]:
    """A function that registers a hook which keeps nothing from step to step."""
    return lambda model: model.register_comm_hook(None, hook)


HOOKS = {
    "float32": stateless(allreduce_hook),
    "float16": stateless(fp16_compress_hook),
    "bfloat16": stateless(as_bfloat16),
    "eight bits": stateless(eight_bits),
    "PowerSGD": power_sgd,
    "no feedback": forgetful_power_sgd,
}


def digit_net() -> nn.Module:
    """A network with one hidden layer for images (N, 1, 28, 28): 50 890 parameters."""
    layers = [nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers, nn.LogSoftmax(dim=1))


def digit_batches(
    rank: int, world_size: int, steps: int, batch: int = 120
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's share, images and labels, of each of `steps` global batches of digits."""
    data = digits()
    per_epoch = len(data) // batch
    for step in range(steps):
        epoch, number = divmod(step, per_epoch)
        shares = global_batches(rank, world_size, len(data), batch, 1, epoch)
        mine = shares[number]
        yield data.images[mine], data.labels[mine]


def train_digits(rank: int, world_size: int, hook: str, steps: int = 36) -> list[float]:
    """The ranks train on the digits with one of the HOOKS; returns this rank's losses."""
    torch.manual_seed(0)
    model = DistributedDataParallel(digit_net())
    HOOKS[hook](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    losses = []
    for step, (images, labels) in enumerate(digit_batches(rank, world_size, steps)):
        with span(f"step {step}"):
            optimizer.zero_grad()
            loss = nll_loss(model(images), labels)
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    return losses
