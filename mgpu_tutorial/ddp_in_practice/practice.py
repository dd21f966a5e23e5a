"""Around the training loop: accumulation, and the trace of a step."""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from mgpu_tutorial.ddp_buckets.experiments import Tower, shares
from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP
from mgpu_tutorial.lab import Ledger, span

# samples, or samples and labels
Part = torch.Tensor | Sequence[torch.Tensor] | Mapping[str, torch.Tensor]


def rows_in(part: Part) -> int:
    """The rows of a tensor, or of the longest in a tuple, a list or a dict."""
    if isinstance(part, torch.Tensor):
        return len(part)
    all_of_it = part.values() if hasattr(part, "values") else part
    tensors = [each for each in all_of_it if torch.is_tensor(each)]
    return max(len(tensor) for tensor in tensors if tensor.dim())


def accumulate(
    model: nn.Module,
    parts: Iterable[Part],
    loss_of: Callable[[nn.Module, Part], torch.Tensor],
    weights: Sequence[float] | None = None,
) -> None:
    """Backward on one part after the other; the ranks average once.

    `loss_of(model, part)` is a mean, and a weight says of how many: of the part's rows, if
    none are given, or for example of its tokens. The weights of each rank have the same sum.
    The model has a `no_sync`, as DistributedDataParallel and AccumulatingDDP have. Not
    general: `prove` it on your model.
    """
    parts = list(parts)
    if weights is None:
        weights = [rows_in(part) for part in parts]
    shares = [weight / sum(weights) for weight in weights]
    *first, last = zip(parts, shares, strict=True)
    with model.no_sync():
        for part, share in first:
            (loss_of(model, part) * share).backward()
    part, share = last
    (loss_of(model, part) * share).backward()


class AccumulatingDDP(BucketedDDP):
    """A backward inside no_sync only adds up on its rank."""

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: float = 25,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(module, bucket_cap_mb, group)
        self.is_syncing = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.is_syncing = False
        try:
            yield
        finally:
            self.is_syncing = True

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        is_sent = self.is_syncing or parameter in self.ready
        if is_sent:
            super().gradient_ready(parameter)


def mean_square(model: nn.Module, part: torch.Tensor) -> torch.Tensor:
    """The loss of a part: the mean of the squares that the model makes of it."""
    return model(part).square().mean()


def step_in_parts(
    rank: int,
    world_size: int,
    method: Callable,
    micro: int,
    wrapper: type[nn.Module] = DistributedDataParallel,
) -> int:
    """The ranks take steps on their shares of 24 samples, in `micro` parts, by `method`.

    Returns the most bytes that autograd kept in the second. Its messages are in a span.
    """
    torch.manual_seed(0)
    model = wrapper(Tower(512, 6), bucket_cap_mb=1)
    if wrapper is DistributedDataParallel:  # the recorder doesn't see calls from C++
        model.register_comm_hook(None, allreduce_hook)
    (batch,) = shares(rank, world_size, 1, width=512)
    for step in range(2):  # DDP's buckets are rebuilt after the first
        model.zero_grad()
        ledger = Ledger()
        ledger.add("the rest", [batch, *model.parameters()])  # is not counted below
        with span(f"step {step}"), ledger.saved_for_backward():
            method(model, batch.tensor_split(micro), mean_square)
            if wrapper is not DistributedDataParallel:
                model.finish_gradient_synchronization()
    return ledger.saved_peak(batch.device)


def profile_step(
    rank: int, world_size: int, folder: str, method: Callable, late: float = 0.0
) -> None:
    """The ranks profile their fourth step into `folder`; rank 1 is `late` seconds late."""
    if late < 0 or (late and world_size == 1):
        raise ValueError(f"there is no rank 1 of {world_size} that can be {late} s late")
    model = DistributedDataParallel(Tower(512, 6), bucket_cap_mb=1)
    parts = list(torch.randn(3, 256, 512))

    def step() -> None:
        model.zero_grad()
        method(model, parts, mean_square)

    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        dist.barrier()  # a profiler takes its time to start, and not the same on all ranks
        if rank == 1:
            time.sleep(late)
        step()
    seen.export_chrome_trace(f"{folder}/rank{rank}.json")


def read_trace(folder: str, rank: int, name: str) -> list[tuple[float, float]]:
    """When the operations whose names begin with `name` began and ended in a trace, in ms."""
    text = Path(folder, f"rank{rank}.json").read_text(encoding="utf-8")
    return [
        (event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)
        for event in json.loads(text)["traceEvents"]
        if event["ph"] == "X" and event["name"].startswith(name)  # X: has a duration
    ]


def union_length(intervals: list[tuple[float, float]]) -> float:
    """For how long at least one of these intervals runs."""
    total, covered = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        if end < begin:
            raise ValueError(f"an interval ends at {end}, before it begins at {begin}")
        if end > covered:
            total += end - max(begin, covered)
            covered = end
    return total
