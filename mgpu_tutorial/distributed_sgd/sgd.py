"""Training on several ranks: a step that is the step of one process, and whole epochs."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import nll_loss
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD, Optimizer

from mgpu_tutorial.data_partitioning import global_batches
from mgpu_tutorial.lab import status
from mgpu_tutorial.shared import checkpoint as checkpoints
from mgpu_tutorial.shared.data import Digits, digits
from mgpu_tutorial.shared.models import SmallConvNet


def average_gradients(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replace each gradient by its mean over the group's ranks, an all_reduce per parameter.

    A group of None is all ranks. They all train the same parameters, in the same order.
    Not general: `prove` it on your model.
    """
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for name, parameter in trained.items():
        if parameter.grad is None:
            raise RuntimeError(f"`{name}` got no gradient")
    for parameter in trained.values():
        parameter.grad /= dist.get_world_size(group)  # first, for float16
        dist.all_reduce(parameter.grad, group=group)


def shared_loss(
    output: torch.Tensor,
    labels: torch.Tensor,
    batch: int,
    loss_of: Callable[..., torch.Tensor] = nll_loss,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """This rank's part of the mean over a global batch; gradients are averaged later.

    `batch` is the number of samples of all ranks together, which nobody can check here: with
    this rank's own the gradients come out as many times too long as there are ranks.
    `loss_of(output, labels, reduction="sum")` adds up, as those of torch.nn.functional do;
    with weights or ignored labels their mean divides by another number. `prove` it.
    """
    total = loss_of(output, labels, reduction="sum")
    return total * dist.get_world_size(group) / batch


def kind_of(ranks: Sequence[torch.Tensor], right: torch.Tensor, limit: float) -> str:
    """What the ranks have in place of the gradient of one process.

    `ranks` are their gradients of one parameter, `right` is that of one process, and `limit`
    how long a difference can be by rounding. `prove` asks this of all tensors of a job.
    """

    def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
        return (found - expected).norm() <= limit

    if all(near(own, right) for own in ranks):
        return "right"
    if near(sum(ranks) / len(ranks), right):
        return "never averaged"
    factor = (ranks[0] * right).sum() / (right * right).sum()
    if all(near(own, factor * right) for own in ranks):
        return f"{factor:.3g} times as long"
    return "another direction"


def new_model(
    seed: int = 0, lr: float = 0.01, decay: float = 0.0, **layers: float | str
) -> tuple[nn.Module, Optimizer]:
    """A network whose weights depend on `seed` only, and its optimizer."""
    torch.manual_seed(seed)
    model = SmallConvNet(**layers)
    return model, SGD(model.parameters(), lr=lr, momentum=0.5, weight_decay=decay)


def flat_parameters(model: nn.Module) -> torch.Tensor:
    """All parameters of `model` as one vector."""
    return parameters_to_vector(model.parameters()).detach()


def train_epoch(
    model: nn.Module, optimizer: Optimizer, data: Digits, epoch: int, batch: int
) -> torch.Tensor:
    """One epoch; returns the sum of this rank's losses, and the number of its samples.

    A BatchNorm sees only this rank's share: `sync_batch_norm` makes it see the whole batch.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shares = global_batches(rank, world_size, len(data), batch, seed=1, epoch=epoch)
    seen = data.images.new_zeros(2)
    for step, mine in enumerate(shares):
        whole = min(batch, len(data) - step * batch)  # the last batch is smaller
        optimizer.zero_grad()
        loss = shared_loss(model(data.images[mine]), data.labels[mine], whole)
        loss.backward()
        average_gradients(model)
        optimizer.step()
        seen += seen.new_tensor([loss.item() * whole / world_size, len(mine)])
    return seen


def train(
    rank: int,
    world_size: int,
    epochs: int = 3,
    batch: int = 128,
    lr: float = 0.01,
    checkpoint: str = "",
    double: bool = False,
) -> tuple[list[list[float]], torch.Tensor]:
    """Train on the digits; all ranks return the losses of every epoch, and the parameters.

    A row of losses: each rank's mean over its share, then the mean over all samples. A run
    goes on from the file `checkpoint`, on any number of ranks. `double`: in float64.
    """
    data = digits(dtype=torch.float64 if double else torch.float32)
    model, optimizer = new_model(lr=lr)
    model.to(data.images.dtype)
    losses, same = [], {"batch": batch, "lr": lr, "double": double}
    if checkpoint:
        losses = checkpoints.load(checkpoint, model, optimizer, **same).get("losses", [])
    if epochs < len(losses):
        done = f"epochs={epochs}, and {len(losses)} are done"
        raise ValueError(f"{done}: ask for more epochs in all")
    for epoch in range(len(losses), epochs):
        mine = train_epoch(model, optimizer, data, epoch, batch)
        ranks = [torch.zeros_like(mine) for _ in range(world_size)]
        dist.all_gather(ranks, mine)
        losses.append([float(total / samples) for total, samples in [*ranks, sum(ranks)]])
        line = f"epoch {epoch}: loss {losses[-1][rank]:.4f}, all ranks {losses[-1][-1]:.4f}"
        print(f"rank {rank}, {line}")
        status(line)
        if checkpoint:
            checkpoints.save(checkpoint, model, optimizer, losses=losses, **same)
    return losses, flat_parameters(model)
