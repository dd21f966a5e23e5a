"""ZeRO 2: every rank has all parameters, and keeps a slice of each gradient.

The all-reduce of the gradients is cut in its two halves. Backward makes the first, a
reduce-scatter, after which each rank holds the sum of its own slice. The optimizer steps that
slice. The second half, an all-gather, then spreads new parameters instead of gradients
(https://arxiv.org/abs/1910.02054, section 5.2).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.ddp_buckets.wrappers import into_buckets
from mgpu_tutorial.sharding.units import Sharded

READY_TWICE = (
    "a gradient became ready twice: call finish_gradient_synchronization() after each "
    "backward"
)


class ShardedGradients(Sharded):
    """A whole module on every rank, of which each rank trains one slice per bucket.

        model = ShardedGradients(module)
        optimizer = Adam(model.shards)
        loss(model(inputs)).backward()
        model.finish_gradient_synchronization()
        optimizer.step()
        model.gather_parameters()

    A bucket is closed at `bucket_cap_mb` MiB. All ranks must use the same parameters in each
    backward, or their calls do not meet.
    Raises ValueError on every rank where their modules differ, or are wrapped already;
    RuntimeError where a second backward comes before `finish_gradient_synchronization`, and
    where somebody has put another tensor in the place of a parameter.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 1.0) -> None:
        super().__init__(module)
        trained = [p for p in module.parameters() if p.requires_grad]
        buckets = into_buckets(trained, bucket_cap_mb)
        self.slices = [Slice(bucket) for bucket in buckets]
        self.slice_of = {p: part for part in self.slices for p in part.parameters}
        self.under_way: Slice | None = None
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self._ready)

    @property
    def shards(self) -> list[nn.Parameter]:
        """This rank's slice of every bucket, for the optimizer."""
        return [part.shard for part in self.slices]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _ready(self, parameter: nn.Parameter) -> None:
        """A gradient is complete; the last one of a bucket sends them all."""
        part = self.slice_of[parameter]
        if parameter not in part.missing:
            raise RuntimeError(READY_TWICE)
        part.missing.remove(parameter)
        if not part.missing:
            self._scatter(part)

    def _scatter(self, part: "Slice") -> None:
        """Begin to add up a bucket, once the one before it has arrived."""
        if self.under_way is not None:
            self.under_way.finish()  # so that only one bucket of gradients is on its way
        self.under_way = part
        part.start()

    def finish_gradient_synchronization(self) -> None:
        """Return when every slice has the mean of its gradient over all ranks."""
        for part in self.slices:
            if part.missing:  # not used by this backward: they count as zero
                self._scatter(part)
        self.under_way.finish()
        self.under_way = None
        for part in self.slices:
            part.missing = set(part.parameters)

    def gather_parameters(self) -> None:
        """After the optimizer's step: every rank gets the slices of all others."""
        for part in self.slices:
            part.require_places()
        works = [part.gather() for part in self.slices]
        for work in works:
            work.wait()


class Slice:
    """A bucket of parameters side by side, and the part of it that is this rank's.

    `missing` are those whose gradient is not complete yet in this backward.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        world_size = dist.get_world_size()
        self.parameters, self.missing = parameters, set(parameters)
        whole = torch.cat([p.detach().flatten() for p in parameters])
        self.pad = -whole.numel() % world_size
        self.flat = nn.functional.pad(whole, (0, self.pad))
        # none is a copy: a step on the shard is a step on the parameters
        for parameter, view in zip(parameters, self.views(), strict=True):
            parameter.data = view
        self.shard = nn.Parameter(self.flat.chunk(world_size)[dist.get_rank()])

    def views(self) -> list[torch.Tensor]:
        """Where each parameter lies in the flat tensor."""
        pieces = self.flat.split([*(p.numel() for p in self.parameters), self.pad])
        pairs = zip(pieces, self.parameters, strict=False)  # the padding is nobody's
        return [piece.view_as(parameter) for piece, parameter in pairs]

    def start(self) -> None:
        """Begin to add up the ranks' gradients, of which this rank gets its slice."""
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters
        ]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        self.sent = nn.functional.pad(flat, (0, self.pad))
        for parameter in self.parameters:
            parameter.grad = None
        self.shard.grad = torch.empty_like(self.shard)
        self.work = dist.reduce_scatter_single(self.shard.grad, self.sent, async_op=True)

    def finish(self) -> None:
        """Wait for the sum, make it the mean, and let go of what was sent."""
        self.work.wait()
        self.shard.grad /= dist.get_world_size()
        self.work = self.sent = None

    def gather(self) -> dist.Work:
        """Begin to collect all slices in the parameters."""
        return dist.all_gather_single(self.flat, self.shard.detach().clone(), async_op=True)

    def require_places(self) -> None:
        """RuntimeError where a parameter lies elsewhere by now, and would stay as it is."""
        for parameter, view in zip(self.parameters, self.views(), strict=True):
            if parameter.data_ptr() != view.data_ptr():
                raise RuntimeError(
                    f"a parameter of shape {list(parameter.shape)} has got another tensor "
                    "since the module was wrapped (.data, .to): change it before you wrap it"
                )
