"""Two wrappers on the way to DistributedDataParallel, as the reader builds them."""

from collections.abc import Reversible
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class NaiveDDP(nn.Module):
    """After backward, a call per parameter averages its gradient.

    `group` are the ranks that train this model together; None is all. Each uses each trained
    parameter in every backward; what is marked `own` is left alone. `prove` it on your model.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        if dist.get_rank(group) < 0:
            raise ValueError("this rank is not in the group")
        self.module, self.group = module, group
        named = dict(module.named_parameters())
        shared = {n: p for n, p in named.items() if not hasattr(p, "own")}
        self.trained = {p: n for n, p in shared.items() if p.requires_grad}
        for tensor in [*shared.values(), *module.buffers()]:
            dist.broadcast(tensor.detach(), group_src=0, group=group)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    def finish_gradient_synchronization(self) -> None:
        for p, name in self.trained.items():
            if p.grad is None:
                raise RuntimeError(f"`{name}` got no gradient")
        for p in self.trained:
            dist.all_reduce(p.grad, dist.ReduceOp.AVG, self.group)


def into_buckets(
    parameters: Reversible[nn.Parameter], bucket_cap_mb: float
) -> list[list[nn.Parameter]]:
    """Lists of parameters of one dtype, the last one first, each closed at the cap in MiB."""
    buckets, bucket, nbytes = [], [], 0
    for parameter in reversed(parameters):
        if bucket and parameter.dtype != bucket[0].dtype:
            buckets.append(bucket)
            bucket, nbytes = [], 0
        bucket.append(parameter)
        nbytes += parameter.nbytes
        if nbytes >= bucket_cap_mb * 2**20:
            buckets.append(bucket)
            bucket, nbytes = [], 0
    if bucket:
        buckets.append(bucket)
    return buckets


def send_bucket(
    bucket: list[nn.Parameter], group: dist.ProcessGroup | None = None
) -> dist.Work:
    """Begin to average a bucket's gradients in one call; each becomes a view."""
    flat = torch.cat([p.grad.flatten() for p in bucket])
    sizes = [p.numel() for p in bucket]
    for p, part in zip(bucket, flat.split(sizes), strict=True):
        p.grad = part.view_as(p)
    return dist.all_reduce(flat, dist.ReduceOp.AVG, group, async_op=True)


class BucketedDDP(NaiveDDP):
    """As NaiveDDP, but each bucket leaves during backward, as soon as it is complete."""

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: float = 25,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(module, group)
        self.buckets = into_buckets(self.trained, bucket_cap_mb)
        self.ready, self.works = set(), []
        for p in self.trained:
            p.register_post_accumulate_grad_hook(self.gradient_ready)

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        if parameter in self.ready:
            raise RuntimeError("a second backward before finish")
        self.ready.add(parameter)
        for bucket in self.buckets[len(self.works) :]:
            if not self.ready.issuperset(bucket):
                return
            self.works.append(send_bucket(bucket, self.group))

    def finish_gradient_synchronization(self) -> None:
        for p, name in self.trained.items():
            if p not in self.ready:
                raise RuntimeError(f"`{name}` sent no gradient since the last finish")
        for work in self.works:
            work.wait()
        self.ready, self.works = set(), []
