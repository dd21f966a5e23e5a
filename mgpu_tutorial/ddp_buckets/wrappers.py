"""Four wrappers on the way to DistributedDataParallel, each simpler than the next.

All hold a replica of a module on every rank, start from rank 0's values, and leave the
mean gradient over all ranks behind. They differ in when they communicate, and in how many
calls. Use them like `torch.nn.parallel.DistributedDataParallel`, with one line more:

    model = BucketedDDP(module)
    loss(model(inputs)).backward()
    model.finish_gradient_synchronization()
    optimizer.step()

At the end of this file are the five together, and what treats all of them alike.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.shared.parameters import require_same

AVG = dist.ReduceOp.AVG


class Replica(nn.Module):
    """A module that starts on every rank from rank 0's parameters and buffers.

    Raises ValueError on every rank where the ranks' modules differ in the name, shape or
    dtype of a parameter or in whether it is trained, and where none is to be trained.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        require_same_parameters(module)
        self.module = module
        # parameters() names tied weights once; frozen ones get no gradient to average.
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.synchronises = True  # False inside no_sync(): then nobody averages
        self.buffers_are_due = True  # rank 0 sends them before the next forward
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), src=0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Rank 0 sends its buffers first, where the forward before this one synchronised."""
        if self.buffers_are_due:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, src=0)
        # as torch: after a forward under no_sync() or no_grad() the next one sends nothing
        self.buffers_are_due = self.synchronises and torch.is_grad_enabled()
        return self.module(*args, **kwargs)

    def _attach(self) -> None:
        """Have `_ready(parameter)` called whenever a gradient is complete."""
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self._ready)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward adds to this rank's own gradients and sends nothing."""
        self.synchronises = False
        try:
            yield
        finally:
            self.synchronises = True

    def finish_gradient_synchronization(self) -> None:
        """Return when every gradient is the mean over all ranks; all ranks call it."""
        raise NotImplementedError


class NaiveDDP(Replica):
    """After backward the ranks average one gradient after the other: a call per parameter."""

    def finish_gradient_synchronization(self) -> None:
        for parameter in self.trained:
            dist.all_reduce(gradient_or_zeros(parameter), op=AVG)


class FlatDDP(Replica):
    """After backward the ranks average one flat copy of all gradients: a call per dtype."""

    def finish_gradient_synchronization(self) -> None:
        for dtype in sorted({p.dtype for p in self.trained}, key=str):
            gradients = [gradient_or_zeros(p) for p in self.trained if p.dtype == dtype]
            flat = torch.cat([g.flatten() for g in gradients])
            dist.all_reduce(flat, op=AVG)
            # back into the gradients, in the same order
            means = flat.split([g.numel() for g in gradients])
            for gradient, mean in zip(gradients, means, strict=True):
                gradient.copy_(mean.view_as(gradient))


class OverlappedDDP(Replica):
    """During backward: a call per parameter, all of which every rank must use."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.works: dict[nn.Parameter, dist.Work] = {}
        self._attach()

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self.synchronises:
            return
        if parameter in self.works:
            raise ready_twice_error(self.module, parameter)
        self.works[parameter] = dist.all_reduce(parameter.grad, op=AVG, async_op=True)

    def finish_gradient_synchronization(self) -> None:
        unused = [p for p in self.trained if p not in self.works]
        if unused:
            raise no_gradient_error(self.module, unused)
        for work in self.works.values():
            work.wait()
        self.works.clear()


class Bucket:
    """Gradients of one dtype side by side in one flat tensor, and which are still missing."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        sizes = [p.numel() for p in parameters]
        self.flat = parameters[0].new_zeros(sum(sizes))
        pieces = zip(parameters, self.flat.split(sizes), strict=True)
        self.views = {p: piece.view_as(p) for p, piece in pieces}
        self.missing = set(parameters)
        self.work: dist.Work | None = None

    def start(self) -> None:
        """Divide each gradient into its view, and begin to add up the ranks' buckets."""
        for parameter, view in self.views.items():
            torch.div(gradient_or_zeros(parameter), dist.get_world_size(), out=view)
            parameter.grad = view
        self.work = dist.all_reduce(self.flat, async_op=True)


class BucketedDDP(Replica):
    """During backward the ranks average each bucket of gradients once it is complete.

    Gradients are views into the buckets. The first backward fills one bucket per dtype and
    learns in which order gradients become ready; then buckets of `bucket_cap_mb` (MiB, as in
    torch) are cut in rank 0's order. A bucket is closed once it holds that many bytes.

    Raises ValueError for a `bucket_cap_mb` that is not positive.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25.0) -> None:
        if not bucket_cap_mb > 0:
            raise ValueError(f"bucket_cap_mb must be positive, got {bucket_cap_mb!r}")
        super().__init__(module)
        self.cap = bucket_cap_mb * 2**20
        self.order: list[nn.Parameter] = []  # who was ready when
        self.rebuilt = False
        self._cut(self.trained, cap=float("inf"))
        self._attach()

    def _cut(self, parameters: Iterable[nn.Parameter], cap: float) -> None:
        self.buckets = [Bucket(part) for part in into_buckets(parameters, cap)]
        self.bucket_of = {p: bucket for bucket in self.buckets for p in bucket.views}
        self.sent = 0

    def _ready(self, parameter: nn.Parameter) -> None:
        if not self.synchronises:
            return
        bucket = self.bucket_of[parameter]
        if parameter not in bucket.missing:
            raise ready_twice_error(self.module, parameter)
        bucket.missing.remove(parameter)
        self.order.append(parameter)
        self._send_complete()

    def _send_complete(self) -> None:
        # in the order of their numbers, on which all ranks agree
        while self.sent < len(self.buckets) and not self.buckets[self.sent].missing:
            self.buckets[self.sent].start()
            self.sent += 1

    def finish_gradient_synchronization(self) -> None:
        # the buckets that have not left yet: what this rank did not use counts as zero
        for bucket in self.buckets:
            bucket.missing.clear()
        self._send_complete()
        # all means are here, and the next backward begins with full lists
        for bucket in self.buckets:
            bucket.work.wait()
            bucket.missing = set(bucket.views)
        self.sent = 0
        # once: buckets of the right size, in the order that the first backward showed
        if not self.rebuilt:
            self._cut(agreed_order(self.trained, self.order), self.cap)
            self.rebuilt = True
        self.order.clear()


def agreed_order(
    trained: list[nn.Parameter], ready: Iterable[nn.Parameter]
) -> list[nn.Parameter]:
    """Rank 0 tells all ranks in which order its gradients became ready, the unused last."""
    index_of = {p: i for i, p in enumerate(trained)}
    order = dict.fromkeys([*ready, *trained])
    indices = torch.tensor([index_of[p] for p in order], device=trained[0].device)
    dist.broadcast(indices, src=0)
    return [trained[i] for i in indices.tolist()]


def into_buckets(parameters: Iterable[nn.Parameter], cap: float) -> list[list[nn.Parameter]]:
    """Cut parameters, in this order, into lists of one dtype, each closed at `cap` bytes."""
    closed: list[list[nn.Parameter]] = []
    filling: dict[tuple, list[nn.Parameter]] = {}
    for parameter in parameters:
        kind = parameter.dtype, parameter.device
        filling.setdefault(kind, []).append(parameter)
        if sum(p.nbytes for p in filling[kind]) >= cap:
            closed.append(filling.pop(kind))
    return closed + list(filling.values())


def gradient_or_zeros(parameter: nn.Parameter) -> torch.Tensor:
    """The gradient; zeros where this rank did not use the parameter, so that all can meet."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def parameter_names(module: nn.Module, parameters: Iterable[nn.Parameter]) -> list[str]:
    """What `module` calls these parameters."""
    known = {p: name for name, p in module.named_parameters()}
    return [known[p] for p in parameters]


def no_gradient_error(module: nn.Module, unused: Iterable[nn.Parameter]) -> RuntimeError:
    """The error for parameters whose mean the other ranks may wait for."""
    names = ", ".join(parameter_names(module, unused))
    return RuntimeError(
        f"no gradient came for {names}: each rank must use every parameter in every "
        "backward, or freeze it before wrapping"
    )


def ready_twice_error(module: nn.Module, parameter: nn.Parameter) -> RuntimeError:
    """The error for a gradient that changes while its mean is on the way."""
    (name,) = parameter_names(module, [parameter])
    return RuntimeError(
        f"the gradient of {name} became ready twice: call finish_gradient_synchronization() "
        "after each backward, or accumulate inside no_sync()"
    )


def require_same_parameters(module: nn.Module) -> None:
    """The ranks compare name, shape and dtype of each parameter, and which are trained.

    Raises ValueError, on every rank alike, where they differ or none requires a gradient.
    """
    mine = [
        (name, list(p.shape), str(p.dtype), p.requires_grad)
        for name, p in module.named_parameters()
    ]
    require_same(mine, "parameters", "build the same module on every rank")
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError("no parameter requires a gradient: there is nothing to synchronise")


# Our four and torch's own, treated alike

WRAPPERS = [NaiveDDP, FlatDDP, OverlappedDDP, BucketedDDP, DistributedDataParallel]
Wrapper = type[nn.Module]


def wrap(
    wrapper: Wrapper, module: nn.Module, bucket_cap_mb: float | None = None
) -> nn.Module:
    """Wrap `module` in one of WRAPPERS; only the last two have buckets.

    They close a bucket at `bucket_cap_mb` MiB, or at their own default of 25 MiB.
    """
    has_buckets = issubclass(wrapper, (BucketedDDP, DistributedDataParallel))
    if has_buckets and bucket_cap_mb is not None:
        return wrapper(module, bucket_cap_mb=bucket_cap_mb)
    return wrapper(module)


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
