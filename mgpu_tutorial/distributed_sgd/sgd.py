"""One step of training on several ranks: everything that makes it the step of one process."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import nll_loss
from torch.nn.utils import parameters_to_vector
from torch.optim import SGD, Optimizer

from mgpu_tutorial.data_partitioning import global_batches
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet


def average_gradients(model: nn.Module) -> None:
    """Replace each gradient by its mean over all ranks: one all_reduce per parameter."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def shared_loss(output: torch.Tensor, labels: torch.Tensor, batch: int) -> torch.Tensor:
    """This rank's part of the mean over a global batch; gradients are averaged later."""
    return nll_loss(output, labels, reduction="sum") * dist.get_world_size() / batch


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


def take_steps(rank: int, world_size: int, steps: int = 5, batch: int = 60) -> torch.Tensor:
    """The ranks share each batch of `batch` samples; returns the parameters."""
    data, (model, optimizer) = digits(), new_model()
    shares = global_batches(rank, world_size, len(data), batch, seed=1, epoch=0)
    for mine in shares[:steps]:
        optimizer.zero_grad()
        nll_loss(model(data.images[mine]), data.labels[mine]).backward()
        average_gradients(model)
        optimizer.step()
    return flat_parameters(model)
