"""DDP from the naive loop to buckets: the same gradients, sooner and in fewer calls."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from mgpu_tutorial.shared.parameters import fingerprint
from mgpu_tutorial.shared.pause import Pause

WRAPPERS = [NaiveDDP, FlatDDP, OverlappedDDP, BucketedDDP, DistributedDataParallel]
Wrapper = type[nn.Module]
Trained = tuple[list[torch.Tensor], list[torch.Tensor]]  # the gradients, the parameters


class Tower(nn.Module):
    """`depth` square layers of `width` and a head, which is defined first and used last.

    With `pause`, the backward of each layer takes that many seconds more, without using the
    processor: as if it ran on another device.
    """

    def __init__(self, width: int = 64, depth: int = 4, pause: float = 0.0) -> None:
        super().__init__()
        self.head = nn.Linear(width, 10)
        self.body = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.pause = pause

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.body:
            x = torch.relu(layer(x))
            if self.pause:
                x = Pause.apply(x, 0.0, self.pause)
        return self.head(x)


def wrap(
    wrapper: Wrapper, module: nn.Module, bucket_cap_mb: float | None = None
) -> nn.Module:
    """Wrap `module` in one of WRAPPERS; only the last two have buckets, of so many MiB.

    Without a `bucket_cap_mb` they take their own, which is 25.
    """
    has_buckets = issubclass(wrapper, (BucketedDDP, DistributedDataParallel))
    if has_buckets and bucket_cap_mb is not None:
        return wrapper(module, bucket_cap_mb=bucket_cap_mb)
    return wrapper(module)


def finish_gradient_synchronization(model: nn.Module) -> None:
    """All ranks wait for the mean gradients; torch's DDP has done so inside backward."""
    if not isinstance(model, DistributedDataParallel):
        model.finish_gradient_synchronization()


def shares(rank: int, world_size: int, steps: int, width: int) -> list[torch.Tensor]:
    """This rank's share of `steps` global batches of 24 samples, the same for every N."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(steps, 24, width, generator=generator, device="cpu")
    mine = whole.tensor_split(world_size, dim=1)[rank]
    return list(mine.to(torch.get_default_device()))


def train_replicas(
    rank: int, world_size: int, wrapper: Wrapper, steps: int = 10, bucket_cap_mb: float = 0.02
) -> Trained:
    """The ranks train a Tower together, each on its share of every batch."""
    torch.manual_seed(rank)  # another start on each rank: rank 0's must win
    model = wrap(wrapper, Tower(), bucket_cap_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in shares(rank, world_size, steps, width=64):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        finish_gradient_synchronization(model)
        optimizer.step()
    return [p.grad for p in model.parameters()], [p.detach() for p in model.parameters()]


def train_alone(steps: int = 10) -> Trained:
    """What one process without any wrapper gets from the same whole batches."""
    torch.manual_seed(0)
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in shares(0, 1, steps, width=64):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return [p.grad for p in model.parameters()], [p.detach() for p in model.parameters()]


def take_fingerprints(
    rank: int, world_size: int, wrapper: Wrapper, broken: str = "", steps: int = 4
) -> list[str]:
    """The fingerprint of this rank's model at the start and after each of `steps` steps.

    `broken` names what differs by rank: "start" (rank 1 sets its weights again after it was
    wrapped), "gradient" (no averaging) or "step" (a learning rate of its own).
    """
    torch.manual_seed(rank)
    model = wrap(wrapper, Tower())
    if broken == "start" and rank == 1:
        model.module.head.reset_parameters()
    lr = 0.1 / (1 + rank) if broken == "step" else 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    prints = [fingerprint(model)]
    for batch in shares(rank, world_size, steps, width=64):
        optimizer.zero_grad()
        with model.no_sync() if broken == "gradient" else nullcontext():
            model(batch).square().mean().backward()
        if broken != "gradient":
            finish_gradient_synchronization(model)
        optimizer.step()
        prints.append(fingerprint(model))
    return prints


def name_by_letters(rows: list[list[str]]) -> list[list[str]]:
    """A letter for each different fingerprint, in order of appearance, column by column."""
    columns = list(zip(*rows, strict=True))
    letter = {f: chr(65 + i) for i, f in enumerate(dict.fromkeys(sum(columns, ())))}
    return [[letter[f] for f in row] for row in rows]


def run_each_setting(
    rank: int, world_size: int, worker: Callable[..., object], settings: dict[str, dict]
) -> dict[str, object]:
    """What `worker` returns with each of the named settings, in turn in the same ranks."""
    return {name: worker(rank, world_size, **given) for name, given in settings.items()}
