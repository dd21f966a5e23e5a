"""ZeRO 3: every rank keeps a slice of every parameter, and borrows the rest to compute.

A unit is a submodule whose parameters lie side by side in one flat tensor. Before its
forward the ranks gather that tensor, after it they let it go; backward gathers it again and
gives each rank the sum of its slice of the gradient. PyTorch's `fully_shard` works so too
(https://docs.pytorch.org/docs/2.13/distributed.fsdp.fully_shard.html).
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from mgpu_tutorial.lab import borrowed
from mgpu_tutorial.sharding.flat import Flat
from mgpu_tutorial.sharding.units import Sharded, alike, blocks_of, outermost, owners
from mgpu_tutorial.shared.parameters import require_same


class ShardedModel(Sharded):
    """A module of which each rank holds one slice per unit; used like its own module.

        model = ShardedModel(module)
        optimizer = Adam(model.parameters())
        loss(model(inputs)).backward()
        model.finish_gradient_synchronization()
        optimizer.step()

    `units` are the submodules whose parameters are sharded; what lies outside them, and what
    two of them share, stays whole on every rank and has its gradients averaged. Without
    `units` everything is sharded, block by block. `compute_dtype` is what slices are cast to
    before they are gathered, and inputs of a unit with them; the slices themselves, their
    gradients and what comes out of the outermost units keep the module's own dtype. With
    `prefetch` the next unit is gathered while this one computes.

    All ranks must use the same units in the same order. Buffers are made equal once.
    Raises ValueError on every rank where the ranks' modules or units differ or are wrapped
    already, and for a unit that is no submodule.
    """

    def __init__(
        self,
        module: nn.Module,
        units: Iterable[nn.Module] | None = None,
        compute_dtype: torch.dtype | None = None,
        prefetch: bool = True,
    ) -> None:
        super().__init__(module)
        self.compute_dtype, self.prefetch = compute_dtype, prefetch
        self.names = {p: name for name, p in module.named_parameters()}
        chosen = blocks_of(module) if units is None else list(units)
        if strangers := [unit for unit in chosen if unit not in set(module.modules())]:
            raise ValueError(f"units must be submodules of the module, got {strangers}")
        groups = {unit: alike(own) for unit, own in owners(module, chosen).items()}
        names = [[self.names[p] for p in group] for own in groups.values() for group in own]
        require_same(
            (names, compute_dtype),
            "units or another compute_dtype",
            "pass the same on every rank",
        )
        self.flats_of = {
            unit: [Flat(unit, group, compute_dtype) for group in own]
            for unit, own in groups.items()
        }
        self.outermost = outermost(self.flats_of)
        self.flats = [flat for flats in self.flats_of.values() for flat in flats]
        self.shards = nn.ParameterList(flat.shard for flat in self.flats)
        self.whole = [p for p in module.parameters() if p.requires_grad]
        self.order: list[Flat] = []  # in which they were first used
        self.gathered_at: dict[int, Flat] = {}  # by the address of the memory
        self.scattering: Flat | None = None
        for unit in self.flats_of:
            unit.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            unit.register_forward_hook(self._after_forward, always_call=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # autograd must not keep what we want to let go: it gets a note instead
        with saved_tensors_hooks(self._note, self._recall):
            return self.module(*args, **kwargs)

    # Forward: a unit's parameters are there while it computes

    def _before_forward(self, unit: nn.Module, args: tuple, kwargs: dict) -> tuple:
        """Gather a unit, start on the next one, and put the parameters in their places."""
        for flat in self.flats_of[unit]:
            if flat not in self.order:
                self.order.append(flat)
            self._gather(flat)
            self._prefetch(self.order.index(flat) + 1)
            flat.backwards_due += torch.is_grad_enabled() and flat.shard.requires_grad
            flat.lend(Gather.apply(flat.shard, flat, self))
        if self.compute_dtype is not None:
            args, kwargs = cast((args, kwargs), self.compute_dtype)
        return args, kwargs

    def _after_forward(self, unit: nn.Module, args: tuple, output: Any) -> Any:
        """Take the parameters away again."""
        for flat in self.flats_of[unit]:
            flat.take_back()
            self._free(flat)
        # inside another unit it stays as it is: that one computes in the same dtype
        if self.compute_dtype is not None and unit in self.outermost:
            output = cast(output, self.flats_of[unit][0].dtype)
        return output

    def _gather(self, flat: Flat) -> torch.Tensor:
        full = flat.gathered()
        self.gathered_at[address_of(full)] = flat
        return full

    def _prefetch(self, place: int) -> None:
        if self.prefetch and 0 <= place < len(self.order):
            self.order[place].start()

    def _free(self, flat: Flat) -> None:
        if flat.full is not None:
            self.gathered_at.pop(address_of(flat.full), None)
        flat.free()

    # Backward: autograd asks for what it kept, and comes to Gather.backward last

    def _note(self, tensor: torch.Tensor) -> "torch.Tensor | Note":
        """What autograd keeps for backward: a note where it is a unit's parameter."""
        flat = self.gathered_at.get(address_of(tensor))
        if flat is None:
            return tensor
        return Note(flat, tensor.shape, tensor.stride(), tensor.storage_offset())

    def _recall(self, kept: "torch.Tensor | Note") -> torch.Tensor:
        """Backward comes to a unit: gather it again, and start on the one before it."""
        if not isinstance(kept, Note):
            return kept
        full = self._gather(kept.flat)
        self._prefetch(self.order.index(kept.flat) - 1)
        return full.as_strided(kept.shape, kept.stride, kept.offset)

    def _scatter(self, flat: Flat, gradient: torch.Tensor) -> None:
        """A unit's gradient is complete: let its parameters go, and begin to add it up."""
        self._free(flat)
        if self.scattering is not None:
            self.scattering.finish()  # so that only one whole gradient is kept at a time
        flat.scatter(gradient)
        self.scattering = flat

    def finish_gradient_synchronization(self) -> None:
        """Return when every slice, and every whole parameter, has its mean gradient."""
        self.scattering = None
        for flat in self.flats:
            self._free(flat)
            flat.finish()
            flat.backwards_due = 0
            if flat.shard.requires_grad and flat.shard.grad is None:
                flat.shard.grad = torch.zeros_like(flat.shard)
        for parameter in self.whole:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()

    # Whole values

    def full_parameters(self) -> dict[str, torch.Tensor]:
        """The whole parameters by name, on every rank; all ranks call it."""
        full = {p: p.detach().clone() for p in self.module.parameters()}
        for flat in self.flats:
            full |= flat.whole_parameters()
        return {name: full[p] for p, name in self.names.items()}

    def load_full_parameters(self, values: dict[str, torch.Tensor]) -> None:
        """Each rank takes its slices of whole parameters, named as `full_parameters` does.

        Raises ValueError where a name is missing or unknown.
        """
        if set(values) != set(self.names.values()):
            different = sorted(set(values) ^ set(self.names.values()))
            raise ValueError(f"missing or unknown: {', '.join(different)}")
        by_parameter = {p: values[name] for p, name in self.names.items()}
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.copy_(by_parameter[parameter])
        for flat in self.flats:
            flat.load(by_parameter)


class Note(NamedTuple):
    """What autograd keeps of a unit's parameter: where to find it when it is gathered."""

    flat: Flat
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int


class Gather(torch.autograd.Function):
    """All-gather in forward, so reduce-scatter in backward."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, flat: Flat, model: Any) -> torch.Tensor:
        ctx.flat, ctx.model = flat, model
        return flat.full.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.model._scatter(ctx.flat, gradient)
        return None, None, None  # the shard's gradient is not there yet: finish() sets it


def address_of(tensor: torch.Tensor) -> int:
    """Where the memory of a tensor, or of what it is a view of, begins."""
    return tensor.untyped_storage().data_ptr()


def cast(values: Any, dtype: torch.dtype) -> Any:
    """The same with each floating-point tensor in `dtype`, also inside lists and dicts."""

    def one(value: Any) -> Any:
        is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_number else value

    return borrowed.map_tree(one, values)
