"""The model on which the wrappers are tried, its batches, a slow network, and training."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP, NaiveDDP
from mgpu_tutorial.lab import span
from mgpu_tutorial.shared.cost_model.links import Link, ring_seconds
from mgpu_tutorial.shared.parameters import fingerprint
from mgpu_tutorial.shared.slow_link import slow_link

Trained = tuple[list[torch.Tensor], list[torch.Tensor]]  # the gradients, the parameters
Wrapper = type[nn.Module]
WRAPPERS = [NaiveDDP, BucketedDDP, DistributedDataParallel]


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


@dataclass(frozen=True)
class Setting:
    """A Tower of `width` and `depth`, a rank's `batch`, and the network between the ranks.

    `pause` is in seconds, for the backward of each layer. `link` replaces this machine's own
    network, and `model` is a kind of Tower.
    """

    width: int = 512
    depth: int = 6
    batch: int = 128
    pause: float = 0.0
    link: Link | None = None
    model: type[Tower] = Tower

    def tower(self) -> Tower:
        tower = self.model(self.width, self.depth)
        if self.pause:
            for layer in tower.body:
                layer.register_forward_hook(self._slow_backward)
        return tower

    def _slow_backward(self, layer: nn.Module, x: tuple, output: torch.Tensor) -> None:
        output.register_hook(lambda gradient: time.sleep(self.pause))

    def inputs(self) -> torch.Tensor:
        return torch.randn(self.batch, self.width)

    def network(self, world_size: int) -> AbstractContextManager:
        """Inside, an all_reduce takes as long as a ring of `world_size` over the link."""
        if self.link is None:
            return nullcontext()
        return slow_link(lambda nbytes: ring_seconds(nbytes, world_size, self.link))


# Our two and torch's own, treated alike


def wrap(
    wrapper: Wrapper, module: nn.Module, bucket_cap_mb: float | None = None
) -> nn.Module:
    """Wrap `module` in one of WRAPPERS, of which the first has no buckets."""
    if bucket_cap_mb is None or wrapper is NaiveDDP:
        return wrapper(module)
    return wrapper(module, bucket_cap_mb=bucket_cap_mb)


def finish_gradient_synchronization(model: nn.Module) -> None:
    """All ranks wait for the mean gradients; torch's DDP has done so inside backward."""
    if not isinstance(model, DistributedDataParallel):
        model.finish_gradient_synchronization()


def calling_from_python(model: nn.Module) -> nn.Module:
    """The same model; torch's DDP makes its all_reduces in Python from now on.

    It would make them in C++, where neither the trace nor a slow link sees them. The hook
    that it gets makes the same calls.
    """
    if isinstance(model, DistributedDataParallel):
        model.register_comm_hook(None, allreduce_hook)
    return model


def trace_steps(model: nn.Module, inputs: torch.Tensor, steps: int) -> None:
    """Take steps, each in a span: inside are forward, backward and finish."""
    for step in range(steps):
        model.zero_grad()
        dist.barrier()
        with span(f"step {step}"):
            with span("forward"):
                loss = model(inputs).square().mean()
            with span("backward"):
                loss.backward()
            with span("finish"):
                finish_gradient_synchronization(model)


# Training


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
    torch.manual_seed(rank)  # a different start on each rank: rank 0's must win
    model = wrap(wrapper, Tower(), bucket_cap_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in shares(rank, world_size, steps, width=64):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        finish_gradient_synchronization(model)
        optimizer.step()
    return [p.grad for p in model.parameters()], [p.detach() for p in model.parameters()]


def train_alone(steps: int = 10) -> Trained:
    """One process without a wrapper trains a Tower on the same whole batches."""
    torch.manual_seed(0)
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in shares(0, 1, steps, width=64):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return [p.grad for p in model.parameters()], [p.detach() for p in model.parameters()]


def follow_one_step(rank: int, world_size: int) -> dict[str, float]:
    """The ranks take a step with a single weight; returns its value at each moment."""
    line = nn.Linear(1, 1, bias=False)
    nn.init.constant_(line.weight, 1.0 + 8.0 * rank)  # another start on each rank
    held = {"drawn": line.weight.item()}
    model = NaiveDDP(line)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held["wrapped"] = line.weight.item()
    # the loss is w x, so the gradient is x: 2 on rank 0, 4 on rank 1
    x = torch.full((1, 1), 2.0 + 2.0 * rank)
    model(x).sum().backward()
    held["own gradient"] = line.weight.grad.item()
    model.finish_gradient_synchronization()
    held["mean gradient"] = line.weight.grad.item()
    optimizer.step()
    held["after the step"] = round(line.weight.item(), 4)
    return held


def take_fingerprints(
    rank: int, world_size: int, wrapper: Wrapper, break_it: Callable[..., None]
) -> list[str]:
    """Four steps on this rank's shares; returns its fingerprints, first that of the start."""
    torch.manual_seed(rank)  # a different network on each rank, before it is wrapped
    model = wrapper(Tower())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    break_it(model, optimizer)
    prints = [fingerprint(model)]
    for batch in shares(rank, world_size, steps=4, width=64):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        finish_gradient_synchronization(model)
        optimizer.step()
        prints.append(fingerprint(model))
    return prints


def run_each_setting(
    rank: int, world_size: int, worker: Callable[..., object], settings: dict[str, dict]
) -> dict[str, object]:
    """The ranks run `worker` with each of the named settings in turn; returns its results."""
    return {name: worker(rank, world_size, **given) for name, given in settings.items()}
