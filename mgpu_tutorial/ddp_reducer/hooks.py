"""Communication hooks: what travels in place of a bucket, and what it does to the loss."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.data_partitioning import global_batches
from mgpu_tutorial.distributed_sgd.sgd import shared_loss
from mgpu_tutorial.shared.data import digits


def as_bfloat16(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The ranks average a bucket in bfloat16: half the bytes, and the range of float32.

    `group` is DDP's group of ranks, and None is all ranks: a hook sees no more of DDP than
    the bucket.
    """
    flat = bucket.buffer()
    small = flat.to(torch.bfloat16).div_(dist.get_world_size(group))
    work = dist.all_reduce(small, group=group, async_op=True)
    # when the sum has arrived: back to float32, into the bucket
    return work.get_future().then(lambda done: flat.copy_(small))


def as_signs(
    group: dist.ProcessGroup | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """The ranks keep only the signs of a gradient, and the mean size of its numbers."""
    for gradient in bucket.gradients():
        gradient.copy_(gradient.sign() * gradient.abs().mean())
    return allreduce_hook(group, bucket)


def signs_with_feedback(
    rest: dict[nn.Parameter, torch.Tensor],
    bucket: dist.GradBucket,
    group: dist.ProcessGroup | None = None,
) -> torch.futures.Future[torch.Tensor]:
    """As `as_signs`, but what is left out of a gradient is added to the next one.

    `group` must be the one DDP was given, which it does not tell its hook: bind it by
    `partial`. Karimireddy and others, 2019, https://arxiv.org/abs/1901.09847.
    """
    pairs = zip(bucket.parameters(), bucket.gradients(), strict=True)
    for parameter, gradient in pairs:
        wanted = gradient + rest.get(parameter, 0)
        sent = wanted.sign() * wanted.abs().mean()
        rest[parameter] = wanted - sent
        gradient.copy_(sent)
    return allreduce_hook(group, bucket)


def train_digits(
    rank: int, world_size: int, hook: Callable | None, state: Any = None
) -> list[float]:
    """The ranks train on the digits, through a hook or not; returns each batch's loss."""
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    if hook:
        model.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    data, losses = digits(), []
    for epoch in range(3):
        shares = global_batches(rank, world_size, len(data), 120, 1, epoch)
        for step, mine in enumerate(shares):
            whole = min(120, len(data) - 120 * step)  # the last batch is smaller
            optimizer.zero_grad()
            output, labels = model(data.images[mine]), data.labels[mine]
            # weighted, because the shares of a batch can be unequal
            loss = shared_loss(output, labels, whole, cross_entropy)
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss.data, op=dist.ReduceOp.AVG)
            losses.append(loss.item())
    return losses
