"""The model on which the wrappers are tried, its batches, and training."""

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP, NaiveDDP

WRAPPERS = {  # with buckets that hold few layers of a Tower
    NaiveDDP: {},
    BucketedDDP: {"bucket_cap_mb": 0.02},
    DistributedDataParallel: {"bucket_cap_mb": 0.02},
}


class Tower(nn.Module):
    """Square layers and a small head, which is defined first and used last."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.head = nn.Linear(width, 10)
        self.body = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body:
            x = torch.relu(layer(x))
        return self.head(x)


def finish_gradient_synchronization(model: nn.Module) -> None:
    """All ranks wait for the mean gradients; torch's DDP has done so inside backward."""
    getattr(model, "finish_gradient_synchronization", lambda: None)()


def shares(rank: int, world_size: int, steps: int, width: int) -> list[torch.Tensor]:
    """This rank's share of `steps` global batches of 24 samples, the same for every N."""
    if not 0 <= rank < world_size or 24 % world_size:
        raise ValueError(
            f"rank {rank} of {world_size} has no equal share of 24 samples, and the mean of "
            "unequal shares' means is not the mean of the batch"
        )
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(steps, 24, width, generator=generator, device="cpu")
    mine = whole.tensor_split(world_size, dim=1)[rank]
    return list(mine.to(torch.get_default_device()))


def train(
    rank: int,
    world_size: int,
    wrapper: type[nn.Module] | None,
    steps: int,
    break_it: Callable | None = None,
    **options: float | bool,
) -> Iterator[nn.Module]:
    """The ranks train a Tower, each on its shares; yields the model before and after a step.

    None is one process, unwrapped. `break_it` gets model and optimizer before the steps.
    """
    torch.manual_seed(rank)  # a different start on each rank: rank 0's must win
    model = wrapper(Tower(), **options) if wrapper else Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if break_it:
        break_it(model, optimizer)
    yield model
    for batch in shares(rank, world_size, steps, width=64):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        finish_gradient_synchronization(model)
        optimizer.step()
        yield model


def train_replicas(
    rank: int,
    world_size: int,
    wrapper: type[nn.Module] | None = None,
    steps: int = 10,
    **options: float | bool,
) -> list[list[torch.Tensor]]:
    """The last gradients and the parameters of a Tower that was trained."""
    *_, model = train(rank, world_size, wrapper, steps, **options)
    return [[p.grad for p in model.parameters()], [p.detach() for p in model.parameters()]]
