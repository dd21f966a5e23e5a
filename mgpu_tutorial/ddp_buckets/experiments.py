"""DDP from the naive loop to buckets: the same gradients, sooner and in fewer calls."""

import hashlib
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.collectives import ring_seconds
from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP
from mgpu_tutorial.lab import slow_link, span
from mgpu_tutorial.lab.draw.timeline import events_of
from mgpu_tutorial.lab.record.report import Report

WAYS = [NaiveDDP, FlatDDP, OverlappedDDP, BucketedDDP, DistributedDataParallel]


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
                x = Pause.apply(x, self.pause)
        return self.head(x)


class Pause(torch.autograd.Function):
    """Returns its input; its backward returns the gradient after `seconds`."""

    @staticmethod
    def forward(context, x: torch.Tensor, seconds: float) -> torch.Tensor:
        context.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(context.seconds)
        return gradient, None


def wrap(
    way: Callable, module: nn.Module, bucket_cap_mb: float = 1.0, from_python: bool = False
) -> nn.Module:
    """Wrap `module` in one of the five ways; only the last two have buckets.

    torch's DDP makes its calls in C++, where neither the trace nor a slow link sees them;
    with `from_python` it gets the hook that makes the same calls from Python.
    """
    if way in (NaiveDDP, FlatDDP, OverlappedDDP):
        return way(module)
    model = way(module, bucket_cap_mb=bucket_cap_mb)
    if way is DistributedDataParallel and from_python:
        model.register_comm_hook(None, allreduce_hook)
    return model


def finish(model: nn.Module) -> None:
    """Wait for the mean gradients; torch's DDP has done so inside backward."""
    if not isinstance(model, DistributedDataParallel):
        model.finish_gradient_synchronization()


def shares(rank: int, world_size: int, steps: int, width: int) -> list[torch.Tensor]:
    """This rank's share of `steps` global batches of 24 samples, the same for every N."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(steps, 24, width, generator=generator, device="cpu")
    mine = whole.tensor_split(world_size, dim=1)[rank]
    return list(mine.to(torch.get_default_device()))


def after_steps(
    rank: int, world_size: int, way: Callable, steps: int = 10, bucket_cap_mb: float = 0.02
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients and parameters of a Tower after `steps` steps on shares of each batch."""
    torch.manual_seed(rank)  # another start on each rank: rank 0's must win
    model = wrap(way, Tower(), bucket_cap_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in shares(rank, world_size, steps, width=64):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        finish(model)
        optimizer.step()
    return [p.grad for p in model.parameters()], [p.detach() for p in model.parameters()]


def each(
    rank: int, world_size: int, worker: Callable, settings: dict[str, dict]
) -> dict[str, object]:
    """What `worker` returns with each of the named settings, in turn in the same ranks."""
    return {name: worker(rank, world_size, **given) for name, given in settings.items()}


def alone(steps: int = 10) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What one process without any wrapper gets from the same whole batches."""
    torch.manual_seed(0)
    model = Tower()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in shares(0, 1, steps, width=64):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return [p.grad for p in model.parameters()], [p.detach() for p in model.parameters()]


def recorded(
    rank: int,
    world_size: int,
    way: Callable,
    width: int = 512,
    depth: int = 6,
    batch: int = 128,
    bucket_cap_mb: float = 1.0,
    pause: float = 0.0,
    link: tuple[float, float] | None = None,
) -> None:
    """Take three steps in one of the WAYS, such that one of them can be drawn."""
    model = wrap(way, Tower(width, depth, pause), bucket_cap_mb, from_python=True)
    with network(world_size, link):
        traced_steps(model, torch.randn(batch, width), 3, finish)


def traced_steps(
    model: nn.Module, inputs: torch.Tensor, steps: int, ending: Callable | None = None
) -> None:
    """Take steps, each in a span, with spans for forward, backward and `ending` inside."""
    for step in range(steps):
        model.zero_grad()
        dist.barrier()
        with span(f"step {step}"):
            with span("forward"):
                loss = model(inputs).square().mean()
            with span("backward"):
                loss.backward()
            if ending:
                with span(ending.__name__):
                    ending(model)


def calls(report: Report, during: str = "step 2") -> dict[str, int]:
    """The all_reduces of rank 0 in one step, their bytes, and how many began in backward."""
    mine = [event for event in events_of(report, during) if event.rank == 0]
    sent = [event for event in mine if event.op == "all_reduce"]
    spans = [event for event in mine if event.note == "backward"]
    early = [s for s in sent if any(b.begin < s.begin < b.end for b in spans)]
    nbytes = sum(event.nbytes for event in sent)
    return {"calls": len(sent), "during backward": len(early), "bytes": nbytes}


def network(world_size: int, link: tuple[float, float] | None):
    """This machine's own network, or a slower one of `link` = (alpha in s, beta in B/s)."""
    if link is None:
        return nullcontext()
    return slow_link(lambda nbytes: ring_seconds(nbytes, world_size, *link))


def step_times(
    rank: int,
    world_size: int,
    ways: list[Callable],
    width: int = 512,
    depth: int = 6,
    batch: int = 128,
    bucket_cap_mb: float = 1.0,
    pause: float = 0.0,
    link: tuple[float, float] | None = None,
    steps: int = 3,
) -> dict[str, list[float]]:
    """The seconds of each step in each way, in turns, after two steps that do not count."""
    models = {
        way.__name__: wrap(way, Tower(width, depth, pause), bucket_cap_mb, link is not None)
        for way in ways
    }
    inputs = torch.randn(batch, width)
    times: dict[str, list[float]] = {name: [] for name in models}
    with network(world_size, link):
        for _ in range(2 + steps):
            for name, model in models.items():
                model.zero_grad()
                dist.barrier()
                begin = time.perf_counter()
                model(inputs).square().mean().backward()
                finish(model)
                times[name].append(time.perf_counter() - begin)
    return {name: seconds[2:] for name, seconds in times.items()}


def fingerprint(model: nn.Module) -> str:
    """A hash of all parameters: equal only where all of them are, to the last bit."""
    numbers = [p.detach().cpu().numpy().tobytes() for p in model.parameters()]
    return hashlib.sha256(b"".join(numbers)).hexdigest()


def fingerprints(
    rank: int, world_size: int, way: Callable, broken: str = "", steps: int = 4
) -> list[str]:
    """The hash of this rank's parameters at the start and after each of `steps` steps.

    `broken` names what differs by rank: "start" (rank 1 sets its weights again after it was
    wrapped), "gradient" (no averaging) or "step" (a learning rate of its own).
    """
    torch.manual_seed(rank)
    model = wrap(way, Tower())
    if broken == "start" and rank == 1:
        model.module.head.reset_parameters()
    lr = 0.1 / (1 + rank) if broken == "step" else 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    hashes = [fingerprint(model)]
    for batch in shares(rank, world_size, steps, width=64):
        optimizer.zero_grad()
        with model.no_sync() if broken == "gradient" else nullcontext():
            model(batch).square().mean().backward()
        if broken != "gradient":
            finish(model)
        optimizer.step()
        hashes.append(fingerprint(model))
    return hashes


def letters(hashes: list[list[str]]) -> list[list[str]]:
    """A letter for each different hash, in order of appearance."""
    columns = list(zip(*hashes, strict=True))
    known = {h: chr(65 + i) for i, h in enumerate(dict.fromkeys(sum(columns, ())))}
    return [[known[h] for h in row] for row in hashes]
