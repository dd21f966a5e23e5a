"""The parameters of one unit side by side in a tensor, of which each rank keeps a slice."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.lab import borrowed
from mgpu_tutorial.sharding.units import places_of


class Flat:
    """What this rank keeps of one unit: its slice, the `shard`, in the module's own dtype.

    `full` is the whole unit while it is gathered, in the compute dtype, and else None.
    """

    def __init__(
        self,
        unit: nn.Module,
        parameters: list[nn.Parameter],
        compute_dtype: torch.dtype | None,
    ) -> None:
        self.unit, self.parameters = unit, parameters
        self.world_size = dist.get_world_size()
        self.dtype = parameters[0].dtype
        self.compute_dtype = self.dtype if compute_dtype is None else compute_dtype
        self.shapes = [p.shape for p in parameters]
        self.padding = -sum(p.numel() for p in parameters) % self.world_size
        self.sizes = [*(p.numel() for p in parameters), self.padding]
        self.shard = nn.Parameter(self.slice_of(parameters), parameters[0].requires_grad)
        # the parameters leave the module, and what they held is given back
        self.places = list(places_of(unit, parameters))
        for module, name, _ in self.places:
            delattr(module, name)
        for parameter in parameters:
            parameter.data = parameter.data.new_empty(0)
        self.full: torch.Tensor | None = None
        self.gathering: dist.Work | None = None
        self.sum: tuple[dist.Work, torch.Tensor, torch.Tensor] | None = None
        self.backwards_due = 0

    def slice_of(self, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
        """This rank's slice of whole tensors, side by side and padded to equal slices."""
        flat = torch.cat([t.detach().flatten() for t in tensors])
        padded = nn.functional.pad(flat, (0, self.padding))
        return padded.chunk(self.world_size)[dist.get_rank()].to(self.dtype, copy=True)

    # Parameters: gathered, lent to the modules, given back

    def start(self) -> None:
        """Begin to gather the slices of all ranks, unless they are here or on the way."""
        if self.full is None:
            mine = self.shard.detach().to(self.compute_dtype)
            self.full = mine.new_empty(self.world_size * mine.numel())
            self.gathering = dist.all_gather_single(self.full, mine, async_op=True)

    def gathered(self) -> torch.Tensor:
        """Wait until all slices are here; returns the whole unit."""
        self.start()
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None
        return self.full

    def lend(self, full: torch.Tensor) -> None:
        """Put each parameter, a view of `full`, where its module looks for it."""
        pieces = full.split(self.sizes)
        self.version = borrowed.version_of(full)
        for module, name, index in self.places:
            if hasattr(module, name):
                raise RuntimeError(
                    f"{name} of {type(module).__name__} was set after the module was sharded "
                    "and would be lost: use load_full_parameters()"
                )
            vars(module)[name] = pieces[index].view(self.shapes[index])

    def take_back(self) -> None:
        """Take the parameters from the modules again."""
        for module, name, _ in self.places:
            vars(module).pop(name, None)
        if self.full is not None and borrowed.version_of(self.full) != self.version:
            raise RuntimeError(
                f"a parameter of {type(self.unit).__name__} was changed while gathered "
                "and would be lost: use load_full_parameters()"
            )

    def free(self) -> None:
        """Let the gathered parameters go; what is on the way must arrive first."""
        if self.gathering is not None:
            self.gathering.wait()
        self.full = self.gathering = None

    # Gradients: every rank gets the sum of its slice

    def scatter(self, gradient: torch.Tensor) -> None:
        """Begin to add up the ranks' gradients of the whole unit."""
        if self.backwards_due == 0:
            raise RuntimeError(
                f"a second backward through the same forward of {type(self.unit).__name__}: "
                "each backward needs a forward of its own"
            )
        self.backwards_due -= 1
        gradient = gradient.contiguous()
        mine = torch.empty_like(self.shard, dtype=gradient.dtype)
        work = dist.reduce_scatter_single(mine, gradient, async_op=True)
        self.sum = work, mine, gradient

    def finish(self) -> None:
        """Wait for the sum, and add its mean to the shard's gradient, in its own dtype."""
        if self.sum is not None:
            work, mine, _ = self.sum
            work.wait()
            mean = mine.to(self.dtype) / self.world_size
            self.shard.grad = mean if self.shard.grad is None else self.shard.grad + mean
            self.sum = None

    # Whole values, in the shards' dtype

    def whole_parameters(self) -> dict[nn.Parameter, torch.Tensor]:
        """Every parameter as all ranks have it together."""
        full = self.shard.new_empty(self.world_size * self.shard.numel())
        dist.all_gather_single(full, self.shard.detach())
        pieces = full.detach().split(self.sizes)[: len(self.shapes)]
        return {
            parameter: piece.view(shape).clone()
            for parameter, shape, piece in zip(
                self.parameters, self.shapes, pieces, strict=True
            )
        }

    def load(self, values: dict[nn.Parameter, torch.Tensor]) -> None:
        """Take this rank's slice of whole values."""
        self.shard.detach().copy_(self.slice_of(values[p] for p in self.parameters))
