"""PyTorch's DistributedDataParallel as a pretended rank has it.

Its reducer is C++ and looks at numbers, so the class is given other insides, which send what
that sends: a broadcast of parameters and buffers where it wraps; buffers before each forward;
and gradients in buckets, each copied in, all-reduced under backward, and copied back at its
end. In the first step all gradients are one bucket, with `static_graph` in the second too.
Later they are filled in the order in which backward made them, until they have 25 MiB, and
the first of them 1 MiB.

Left out: a few bytes by which the ranks compare shapes and agree on that order. Its hooks for
communication, `join` and mixed precision have no price here: the course's `BucketedDDP` has.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.instruments.price.products import Unpriced
from mgpu_tutorial.lab import borrowed

MIB = 2**20
FIRST, CAP, TOGETHER = 1 * MIB, 25 * MIB, 250 * MIB  # bytes; the last of a broadcast
UNPRICED = ("delay_all_reduce_named_params", "mixed_precision", "bucket_cap_mb_list")


class Bucket:
    """Parameters whose gradients travel together, and the memory in which they do."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters, self.waits_for = parameters, len(parameters)
        self.flat = parameters[0].new_empty(sum(p.numel() for p in parameters))
        parts = self.flat.split([p.numel() for p in parameters])
        pairs = zip(parts, parameters, strict=True)
        self.views = {p: part.view(p.shape) for part, p in pairs}
        self.work: dist.Work | None = None


class Reducer:
    """Fills buckets, sends each when it and all before it are full, waits at the end."""

    def __init__(self, ddp: nn.Module, parameters: list[nn.Parameter], limits: Sequence[int]):
        self.ddp, self.limits, self.order = ddp, limits, list[nn.Parameter]()
        self.is_rebuilt, self.expects, self.sent = ddp.find_unused_parameters, False, 0
        self.before = 2 if ddp.static_graph else 1  # steps until it knows the order
        first = limits if ddp.find_unused_parameters else [sys.maxsize]
        self.fill(list(reversed(buckets_of(parameters, first))))
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self.ready)

    def fill(self, buckets: list[list[nn.Parameter]]) -> None:
        self.buckets = [Bucket(parameters) for parameters in buckets]
        self.of = {p: bucket for bucket in self.buckets for p in bucket.parameters}

    def begin(self) -> None:
        """Before a forward whose backward sends."""
        if self.expects:
            raise RuntimeError(
                "DistributedDataParallel: a parameter had no gradient in the step before: "
                "give find_unused_parameters=True"
            )
        if self.before == 0 and not self.is_rebuilt:
            self.fill(buckets_of(self.order, self.limits))
            self.is_rebuilt = True
        for bucket in self.buckets:
            bucket.waits_for = len(bucket.parameters)
        self.order, self.sent, self.expects = [], 0, True

    @torch.no_grad()
    def ready(self, parameter: nn.Parameter) -> None:
        """Backward has made this gradient."""
        if not self.expects:
            return
        if not self.order and self.ddp.find_unused_parameters:
            borrowed.when_backward_ends(self.finish)
        self.order.append(parameter)
        bucket = self.of[parameter]
        view, ranks = bucket.views[parameter], self.ddp.process_group.size()
        torch.mul(parameter.grad, 1 / ranks, out=view)
        if self.ddp.gradient_as_bucket_view:
            parameter.grad = view
        bucket.waits_for -= 1
        while self.sent < len(self.buckets) and not self.buckets[self.sent].waits_for:
            self.send(self.buckets[self.sent])
            self.sent += 1
        if self.sent == len(self.buckets) and not self.ddp.find_unused_parameters:
            borrowed.when_backward_ends(self.finish)

    def send(self, bucket: Bucket) -> None:
        group = self.ddp.process_group
        bucket.work = dist.all_reduce(bucket.flat, group=group, async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Backward is over: wait, and hand the means out."""
        if self.ddp.find_unused_parameters:
            for bucket in self.buckets[self.sent :]:
                self.send(bucket)
            used = torch.zeros(len(self.of), dtype=torch.int32)
            dist.all_reduce(used, group=self.ddp.process_group)
        for bucket in self.buckets:
            bucket.work.wait()
            for parameter, view in bucket.views.items():
                if parameter.grad is not None and not self.ddp.gradient_as_bucket_view:
                    parameter.grad.copy_(view)
        self.expects = False
        self.before = max(0, self.before - 1)


def buckets_of(parameters: Iterable[nn.Parameter], limits: Sequence[int]) -> list[list]:
    """Parameters of one dtype together, in order, until they have so many bytes or more."""
    done: list[list] = []
    filling: dict[torch.dtype, list] = {}
    closed: dict[torch.dtype, int] = {}
    for parameter in parameters:
        kind = parameter.dtype
        filling.setdefault(kind, []).append(parameter)
        limit = limits[min(closed.get(kind, 0), len(limits) - 1)]
        if sum(p.nbytes for p in filling[kind]) >= limit:
            done.append(filling.pop(kind))
            closed[kind] = closed.get(kind, 0) + 1
    return [*done, *filling.values()]


def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """From the group's first rank, those of one dtype together, up to 250 MiB."""
    for together in buckets_of(tensors, [TOGETHER]):
        flat = together[0].new_empty(sum(tensor.numel() for tensor in together))
        dist.broadcast(flat, group=group, group_src=0)


def wrap(
    self: DistributedDataParallel,
    module: nn.Module,
    device_ids: Any = None,
    output_device: Any = None,
    dim: int = 0,
    broadcast_buffers: bool | None = None,
    init_sync: bool = True,
    process_group: dist.ProcessGroup | None = None,
    bucket_cap_mb: float | None = None,
    find_unused_parameters: bool = False,
    check_reduction: bool = False,
    gradient_as_bucket_view: bool = False,
    static_graph: bool = False,
    device_mesh: dist.DeviceMesh | None = None,
    forward_sync_buffers: bool | None = None,
    **others: Any,
) -> None:
    """In place of `DistributedDataParallel.__init__`, with its arguments."""
    for name in UNPRICED:
        if others.get(name) is not None:
            raise unpriced(name)
    nn.Module.__init__(self)
    self.module, self.static_graph = module, static_graph
    self.device_ids = self.output_device = None
    self.device = next(module.parameters()).device
    if device_mesh is not None:
        process_group = device_mesh.get_group()
    self.process_group = process_group or dist.group.WORLD
    self.find_unused_parameters = find_unused_parameters and not static_graph
    self.gradient_as_bucket_view = gradient_as_bucket_view
    self.require_backward_grad_sync = self.require_forward_param_sync = True
    both = forward_sync_buffers, broadcast_buffers
    self.forward_sync_buffers = next((given for given in both if given is not None), True)
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    named = {n: p for n, p in module.named_parameters() if n not in ignored}
    buffers = [b for n, b in module.named_buffers() if n not in ignored]
    parameters = [p for p in named.values() if p.requires_grad]
    if init_sync:
        broadcast([*named.values(), *buffers], self.process_group)
    cap = CAP if bucket_cap_mb is None else int(bucket_cap_mb * MIB)
    limits = [FIRST, CAP] if bucket_cap_mb is None else [cap]
    object.__setattr__(self, "pretended", Reducer(self, parameters, limits))
    self.modules_buffers = buffers


def forward(self: DistributedDataParallel, *inputs: Any, **keywords: Any) -> Any:
    """In place of its forward."""
    sends = torch.is_grad_enabled() and self.require_backward_grad_sync
    if sends:
        self.pretended.begin()
    if self.require_forward_param_sync and self.forward_sync_buffers:
        broadcast(self.modules_buffers, self.process_group)
    self.require_forward_param_sync = sends
    return self.module(*inputs, **keywords)


def unpriced(name: str) -> Unpriced:
    """The refusal of what only its reducer can do."""
    return Unpriced(
        f"what DistributedDataParallel does with {name} has no price: leave it out, or price "
        "the course's BucketedDDP with what you want to change"
    )


def pretend() -> None:
    """Give the class these insides, until the process ends."""

    def refuse(name: str) -> Any:
        def call(self: DistributedDataParallel, *_: Any, **__: Any) -> None:
            raise unpriced(name)

        return call

    DistributedDataParallel.__init__ = wrap
    DistributedDataParallel.forward = forward
    for name in ("register_comm_hook", "join"):
        setattr(DistributedDataParallel, name, refuse(name))
