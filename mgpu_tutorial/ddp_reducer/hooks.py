"""Communication hooks: what travels in place of a bucket, and what it does to the loss."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.functional import nll_loss
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.data_partitioning import global_batches
from mgpu_tutorial.lab import span
from mgpu_tutorial.shared.data import digits


def as_bfloat16(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The ranks average a bucket in bfloat16: half the bytes, and the range of float32."""
    flat = bucket.buffer()
    small = flat.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(small, async_op=True)
    # when the sum has arrived: back to float32, into the bucket
    return work.get_future().then(lambda done: flat.copy_(small))


def as_signs(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The ranks keep only the signs of a gradient, and the mean size of its numbers."""
    for gradient in bucket.gradients():
        gradient.copy_(gradient.sign() * gradient.abs().mean())
    return allreduce_hook(None, bucket)


def signs_with_feedback(
    rest: dict[nn.Parameter, torch.Tensor], bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """As `as_signs`, but what is left out of a gradient is added to the next one.

    Karimireddy and others, 2019, https://arxiv.org/abs/1901.09847.
    """
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
        wanted = gradient + rest.get(parameter, 0)
        sent = wanted.sign() * wanted.abs().mean()
        rest[parameter] = wanted - sent
        gradient.copy_(sent)
    return allreduce_hook(None, bucket)


HOOKS: dict[str, Callable[[DistributedDataParallel], None]] = {
    "float32": lambda model: model.register_comm_hook(None, allreduce_hook),
    "bfloat16": lambda model: model.register_comm_hook(None, as_bfloat16),
    "signs": lambda model: model.register_comm_hook(None, as_signs),
    "signs, feedback": lambda model: model.register_comm_hook({}, signs_with_feedback),
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
