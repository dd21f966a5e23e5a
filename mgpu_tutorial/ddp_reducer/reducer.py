"""Look into the Reducer of torch's DDP: which bucket it sends when, and when it does not."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.experiments import Tower
from mgpu_tutorial.lab import Ledger

Buckets = list[list[str]]  # the names of the parameters in each bucket, in order of sending


def note_buckets(model: DistributedDataParallel) -> list[Buckets]:
    """Note the buckets of every later iteration in the list that is returned."""
    names = {parameter: name for name, parameter in model.module.named_parameters()}
    iterations: list[Buckets] = []

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        # look: bucket 0 begins an iteration
        if bucket.index() == 0:
            iterations.append([])
        iterations[-1].append([names[p] for p in bucket.parameters()])
        # then do what DDP does without a hook: divide, and add up over the ranks
        flat = bucket.buffer().div_(model.process_group.size())
        work = dist.all_reduce(flat, group=model.process_group, async_op=True)
        return work.get_future().then(lambda done: flat)

    model.register_comm_hook(None, hook)
    return iterations


def observe_buckets(
    rank: int, world_size: int, width: int = 256, iterations: int = 3, **options: Any
) -> list[Buckets]:
    """The ranks train DDP(Tower(width, 6), **options); returns each iteration's buckets."""
    model = DistributedDataParallel(Tower(width, depth=6), **options)
    seen = note_buckets(model)
    for _ in range(iterations):
        model.zero_grad()
        model(torch.randn(4, width)).square().mean().backward()
    return seen


def count_memory(rank: int, world_size: int, **options: Any) -> dict[str, int]:
    """The ranks train DDP(Tower(512, 6), **options); returns the bytes that a rank holds."""
    model = DistributedDataParallel(Tower(512, depth=6), **options)
    buckets: dict[int, torch.Tensor] = {}

    def hook(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets[bucket.index()] = bucket.buffer()
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, hook)
    for _ in range(3):  # the buckets of the third are final, whatever the options
        model.zero_grad()
        model(torch.randn(4, 512)).square().mean().backward()
    ledger = Ledger()  # counts a piece of memory once, under the first name that it gets
    ledger.add("parameters", list(model.parameters()))
    ledger.add("buckets", buckets)
    ledger.add("gradients", [p.grad for p in model.parameters()])
    return ledger[str(buckets[0].device)]


class TwoHeads(nn.Module):
    """Two heads; a forward uses the first, and `second` times the second if that is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 1)
        self.second = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, second: float | None = None) -> torch.Tensor:
        output = self.first(x)
        if second is not None:
            output = output + second * self.second(x)
        return output


def train_two_heads(
    rank: int, world_size: int, second: Sequence[float | None], steps: int = 2, **options: Any
) -> list[float | None]:
    """The ranks train DDP(TwoHeads(), **options); rank r gives `second[r]` to its forward.

    Returns the gradient of each head's bias. The first head's is 2 on rank 0 and 4 on
    rank 1, before they are averaged.
    """
    model = DistributedDataParallel(TwoHeads(), **options)
    biases = [model.module.first.bias, model.module.second.bias]
    for step in range(steps):
        model.zero_grad()
        output = model(torch.ones(2, 4), second[rank])
        print(f"forward {step} done")
        (output.sum() * (1 + rank)).backward()
        print(f"backward {step} done: gradient {biases[0].grad.item()}")
    return [None if bias.grad is None else bias.grad.item() for bias in biases]
