"""Two wrappers on the way to DistributedDataParallel, as the reader builds them.

In every backward each rank uses all parameters that are trained, of one dtype. What else a
wrapper is given it refuses, in the functions `require_…` and `refuse_…`.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mgpu_tutorial.shared.groups import (
    copy_in_group,
    order_of,
    require_dense,
    require_same,
    require_whole,
)


def require_replicable(module: nn.Module) -> None:
    """Raise a ValueError, before anything is sent, for a module without means to send."""
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError(
            "no parameter of this module is trained, so there are no gradients to average: "
            "call the module itself, without a wrapper"
        )
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(
                f"`{name}` has no shape before its lazy layer has seen a batch: run one "
                "through the module first, then wrap it"
            )
        if tensor.is_meta:
            raise ValueError(
                f"`{name}` is on the meta device, which holds no values to send: "
                "give the module its values, then wrap it"
            )
    for name, part in module.named_modules():
        if getattr(part, "sparse", False):
            raise ValueError(
                f"`{name}` has sparse gradients, and a bucket is a dense tensor: "
                "make the embedding with sparse=False"
            )


def require_gradients(
    module: nn.Module, trained: Iterable[nn.Parameter], ready: Iterable[nn.Parameter]
) -> None:
    """Raise a RuntimeError unless what is trained is what was trained at wrapping, and ready.

    Each rank looks at its own module: one that left out a parameter raises, and the others
    learn of it when its process ends.
    """
    trained, ready = set(trained), set(ready)
    for name, parameter in module.named_parameters():
        if parameter.requires_grad != (parameter in trained):
            change = "thawed or replaced" if parameter.requires_grad else "frozen"
            raise RuntimeError(
                f"`{name}` was {change} after the module was wrapped, and the wrapper does "
                "not know: first freeze, thaw and replace, then wrap"
            )
        if parameter.requires_grad and parameter not in ready:
            if getattr(parameter, "awaits_mean", False):
                raise RuntimeError(
                    f"`{name}` has a gradient that was never sent, because each backward was "
                    "inside no_sync: leave the last one outside, as accumulate does"
                )
            raise RuntimeError(
                f"`{name}` got no gradient, so it has no mean: every rank must use each "
                "trained parameter in every forward, if need be times zero, or freeze it "
                "before wrapping"
            )
    if len(trained) > len(trained.intersection(module.parameters())):
        raise RuntimeError(
            "a trained parameter was taken out of the module after it was wrapped, and the "
            "wrapper does not know: first change the module, then wrap"
        )


def require_alike(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise a ValueError on every rank unless all have the same parameters and buffers."""
    require_whole(module.named_parameters(), group)
    tensors = [*module.named_parameters(), *module.named_buffers()]
    layout = [(n, order_of(t), str(t.dtype), t.requires_grad) for n, t in tensors]
    require_same("name, shape, dtype and requires_grad of each tensor", layout, group)
    require_dense(tensors)


def refuse_early_step(optimizer: Optimizer, *_: object) -> None:
    """Raise a RuntimeError in a step that would take gradients which no rank has averaged."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(p.grad is not None and getattr(p, "awaits_mean", False) for p in parameters):
        raise RuntimeError(
            "an optimizer's step after a backward without finish_gradient_synchronization: "
            "its gradients are this rank's own, or still on their way, so finish first"
        )


register_optimizer_step_pre_hook(refuse_early_step)
register_optimizer_step_post_hook(refuse_early_step)  # of a closure that did not finish


class NaiveDDP(nn.Module):
    """A replica on every rank; after backward, a call per parameter averages its gradient.

    `group` are the ranks that train this model together; None is all of them. They start
    alike once, here: load into the module before it is wrapped, or on all ranks. A step
    without `finish_gradient_synchronization` isn't noticed here, and BucketedDDP refuses it.
    Unscale and clip after it, when the gradients are means. gloo adds up before it divides,
    so float16 gradients whose sum is above 65,504 become inf, however small their mean. The
    mean is that of one process where all ranks have equally many samples; a BatchNorm's
    statistics stay those of each rank. Several models are finished in the same order on all
    ranks.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        require_replicable(module)
        require_alike(module, group)
        self.module, self.group = module, group
        self.trained = [p for p in module.parameters() if p.requires_grad]
        for tensor in [*module.parameters(), *module.buffers()]:
            dist.broadcast(tensor.detach(), group_src=0, group=group)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    def finish_gradient_synchronization(self) -> None:
        ready = [p for p in self.trained if p.grad is not None]
        require_gradients(self.module, self.trained, ready)
        for parameter in self.trained:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG, group=self.group)


def into_buckets(
    parameters: Iterable[nn.Parameter], bucket_cap_mb: float
) -> list[list[nn.Parameter]]:
    """Lists of parameters, the last one first, each closed once it holds the cap in MiB."""
    parameters = list(parameters)
    if not isinstance(bucket_cap_mb, int | float) or not bucket_cap_mb >= 0:  # nan is not
        raise ValueError(f"bucket_cap_mb is {bucket_cap_mb!r}: give a size in MiB, 0 or more")
    dtypes = sorted({str(p.dtype) for p in parameters})
    if len(dtypes) > 1:
        raise ValueError(
            f"trained parameters of {' and '.join(dtypes)}: a bucket is one tensor of one "
            "dtype, so convert the module before you wrap it"
        )
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


def send_bucket(
    bucket: list[nn.Parameter], group: dist.ProcessGroup | None = None
) -> dist.Work:
    """Begin to average the gradients in one flat tensor; each becomes a view into it."""
    flat = torch.cat([p.grad.flatten() for p in bucket])
    sizes = [p.numel() for p in bucket]
    for p, part in zip(bucket, flat.split(sizes), strict=True):
        p.grad = part.view_as(p)
    return dist.all_reduce(flat, op=dist.ReduceOp.AVG, group=group, async_op=True)


class BucketedDDP(NaiveDDP):
    """As NaiveDDP, but each bucket leaves during backward, as soon as it is complete.

    A deep copy averages its own gradients: it has hooks of its own, and sends nothing when
    it is made.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_cap_mb: float = 25,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        require_replicable(module)
        trained = [p for p in module.parameters() if p.requires_grad]
        buckets = into_buckets(trained, bucket_cap_mb)
        if any(hasattr(p, "awaits_mean") for p in trained):
            raise ValueError(
                "this module is in a BucketedDDP already, and a second one would send its "
                "gradients again: use that wrapper, or make the module anew"
            )
        require_same("bucket_cap_mb", [bucket_cap_mb], group)
        super().__init__(module, group)
        self.buckets = buckets
        self.ready, self.works = set(), []
        self.watch()

    def __deepcopy__(self, memo: dict) -> "BucketedDDP":
        """Copies have none of the hooks: they are registered anew."""
        other = copy_in_group(self, memo)
        other.watch()
        return other

    def watch(self) -> None:
        for parameter in self.trained:
            parameter.awaits_mean = False  # for refuse_early_step
            parameter.register_post_accumulate_grad_hook(self.note_backward)
            parameter.register_post_accumulate_grad_hook(self.gradient_ready)

    def note_backward(self, parameter: nn.Parameter) -> None:
        parameter.awaits_mean = True

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        if parameter in self.ready:
            raise RuntimeError(
                "a second backward before finish_gradient_synchronization, while the buckets "
                "of the first are on their way: finish after each backward, or add up the "
                "losses and go backward once"
            )
        self.ready.add(parameter)
        for bucket in self.buckets[len(self.works) :]:
            if not self.ready.issuperset(bucket):
                return
            self.works.append(send_bucket(bucket, self.group))

    def finish_gradient_synchronization(self) -> None:
        require_gradients(self.module, self.trained, self.ready)  # so every bucket has left
        for work in self.works:
            work.wait()
        self.ready, self.works = set(), []
        for parameter in self.trained:
            parameter.awaits_mean = False
