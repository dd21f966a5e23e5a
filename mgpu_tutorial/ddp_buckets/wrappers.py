"""Two wrappers on the way to DistributedDataParallel, as the reader of 07 builds them.

In every backward each rank uses all parameters that are trained, of one dtype in a bucket.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class NaiveDDP(nn.Module):
    """A replica on every rank; after backward, a call per parameter averages its gradient."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.trained = [p for p in module.parameters() if p.requires_grad]
        for tensor in module.state_dict().values():
            dist.broadcast(tensor, src=0)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    def finish_gradient_synchronization(self) -> None:
        for parameter in self.trained:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)


def into_buckets(
    parameters: list[nn.Parameter], bucket_cap_mb: float
) -> list[list[nn.Parameter]]:
    """Lists of parameters, the last one first, each closed once it holds the cap in MiB."""
    buckets, bucket, nbytes = [], [], 0
    for parameter in reversed(parameters):
        bucket.append(parameter)
        nbytes += parameter.nbytes
        if nbytes >= bucket_cap_mb * 2**20:
            buckets.append(bucket)
            bucket, nbytes = [], 0
    if bucket:
        buckets.append(bucket)
    return buckets


def send_bucket(bucket: list[nn.Parameter]) -> dist.Work:
    """Begin to average the gradients in one flat tensor; each becomes a view into it."""
    flat = torch.cat([p.grad.flatten() for p in bucket])
    sizes = [p.numel() for p in bucket]
    for p, part in zip(bucket, flat.split(sizes), strict=True):
        p.grad = part.view_as(p)
    return dist.all_reduce(flat, op=dist.ReduceOp.AVG, async_op=True)


class BucketedDDP(NaiveDDP):
    """As NaiveDDP, but each bucket leaves during backward, as soon as it is complete."""

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25) -> None:
        super().__init__(module)
        self.buckets = into_buckets(self.trained, bucket_cap_mb)
        self.ready, self.works = set(), []
        for parameter in self.trained:
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        self.ready.add(parameter)
        for bucket in self.buckets[len(self.works) :]:
            if not self.ready.issuperset(bucket):
                return
            self.works.append(send_bucket(bucket))

    def finish_gradient_synchronization(self) -> None:
        for work in self.works:
            work.wait()
        self.ready, self.works = set(), []
