"""ZeRO 3 with one flat tensor a block; the second class sends beside the compute."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from mgpu_tutorial.lab.borrowed import backward_number, when_backward_ends
from mgpu_tutorial.sharding.refusals import (
    mark,
    require_block,
    require_in_forward,
    require_no_graph,
    require_one_dtype,
    require_unmoved,
)
from mgpu_tutorial.sharding.zero import Gather, flatten, shard_of
from mgpu_tutorial.shared.groups import copy_in_group


def views_of(
    flat: torch.Tensor, shapes: dict[str, torch.Size], places: dict[str, str] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of these shapes that lie side by side in a flat one, by name.

    With `places` one for each place instead, such as both places of a tied weight.
    """
    sizes = [shape.numel() for shape in shapes.values()]
    parts = flat[: sum(sizes)].split(sizes)
    views = {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}
    return {place: views[name] for place, name in places.items()} if places else views


def blocks_in(model: nn.Module) -> list[nn.Module]:
    """The modules that keep a shard, the model too if it does."""
    shards = [(part, getattr(part, "shard", None)) for part in model.modules()]
    return [part for part, shard in shards if getattr(shard, "sharded", False)]


def places_of(module: nn.Module, units: Sequence[nn.Module] = ()) -> dict[str, nn.Parameter]:
    """The parameters, at each place, that neither blocks inside have nor these units."""
    inner = {part for unit in (*blocks_in(module), *units) for part in unit.modules()}
    return {
        name: parameter
        for path, part in module.named_modules()
        if part not in inner
        for name, parameter in part.named_parameters(path, False, False)
    }


def take_out(
    module: nn.Module, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, dict[str, torch.Size], dict[str, str]]:
    """Take the parameters out of a module, but for those of the blocks inside.

    Returns this rank's shard of them in one flat tensor, the shape of each, and by which of
    these names each place is to be filled: a tied weight is at two places, and sent once.
    """
    places = places_of(module)
    require_block(module, places)  # not tied to others, not frozen, of one dtype
    first: dict[nn.Parameter, str] = {}
    for name, parameter in places.items():
        first.setdefault(parameter, name)
        parameter.sharded = 0  # taken out: a second block and an old optimizer refuse it
        parent, _, last = name.rpartition(".")
        delattr(module.get_submodule(parent), last)
    shapes = {name: parameter.shape for parameter, name in first.items()}
    shard = shard_of(flatten(first, group), group).clone()
    return shard, shapes, {name: first[parameter] for name, parameter in places.items()}


class FlatShard(nn.Module):
    """Keeps the parameters of a module as this rank's shard of one flat tensor."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        shard, self.shapes, self.places = take_out(module, group)
        self.shard = nn.Parameter(shard)
        mark(self.shard, group)
        self.module, self.group, self.whole = module, group, None

    def gathered(self) -> dict[str, torch.Tensor]:
        """Gather into `whole`, and give the parameters at their places: views of it."""
        whole = self.unshard()
        if whole.requires_grad:
            whole.register_hook(self.reshard)  # once its gradient is complete
        self.whole = whole.detach()  # the same memory, without its graph
        return views_of(whole, self.shapes, self.places)

    def unshard(self) -> torch.Tensor:
        return Gather.apply(self.shard, self.group)

    def reshard(self, gradient: torch.Tensor | None = None) -> None:
        self.whole = None

    def whole_tensors(self, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The whole of this rank's shard, or of its gradient, by the module's names."""
        return views_of(Gather.apply(own["shard"].detach(), self.group), self.shapes)

    def requires_grad_(self, requires_grad: bool = True) -> "FlatShard":
        """Freeze or thaw the shards of this block and of those inside."""
        for block in blocks_in(self):
            block.shard.requires_grad_(requires_grad)
        return self

    def __deepcopy__(self, memo: dict) -> "FlatShard":
        """A copy that knows its shard as one."""
        other = copy_in_group(self, memo)
        mark(other.shard, self.group)
        return other

    def __getattr__(self, name: str) -> Any:
        """What the module has, as if there were no block around it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in vars(self).get("_modules", ()):
                raise
        require_in_forward(name, self.places)
        return getattr(self.module, name)


class ShardedBlock(FlatShard):
    """Whole while it computes, in forward and in backward.

    What a block inside has already is left to it. The group is all ranks by default.
    """

    recomputed, version_kept = False, None  # see `kept`

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        views = self.gathered()
        try:
            with self.kept():
                return functional_call(self.module, views, inputs, keywords)
        finally:
            self.reshard()

    def kept(self) -> AbstractContextManager:
        """What autograd would keep goes through pack; not in a block that is recomputed.

        There the hooks of the checkpoint drop all of it, and would not see through ours. In
        backward this forward runs again, and gathers again.
        """
        if not self.recomputed:
            return saved_tensors_hooks(self.pack, self.unpack)
        if backward_number() < 0:
            self.version_kept = self.shard._version
        else:
            require_unmoved(self.shard, self.version_kept)
        return nullcontext()

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd would keep a tensor: of a view of `whole` it keeps the place only."""
        memory = self.whole.untyped_storage()
        if tensor.untyped_storage() is not memory:
            return tensor
        place = tensor.shape, tensor.stride(), tensor.storage_offset()
        return *place, self.shard._version  # which counts the steps

    def unpack(self, kept: Any) -> torch.Tensor:
        """Backward asks for what was kept: the first place gathers the block again."""
        if isinstance(kept, torch.Tensor):
            return kept
        *place, version = kept
        require_unmoved(self.shard, version)
        if self.whole is None:
            self.whole = self.unshard().detach()
        return self.whole.as_strided(*place)


def fully_sharded(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    group: dist.ProcessGroup | None = None,
    kind: Callable = ShardedBlock,
) -> nn.Module:
    """Each of these blocks of the model becomes sharded, and the root for what is in none.

    Returns the root, or the model itself where nothing is left for it. Inner blocks come
    before those around them. All ranks begin with the same values, and have equally many
    samples in each step, or the mean is not that of the batch. Raises ValueError where
    a block is not inside the model, frozen, of several dtypes or tied to another one.
    """
    blocks = list(blocks)
    require_blocks(model, blocks)
    for block in blocks:
        every = model.named_modules(remove_duplicate=False)
        paths = [path for path, part in every if part is block]
        sharded = kind(block, group)
        for path in paths:
            model.set_submodule(path, sharded)
    return kind(model, group) if places_of(model) else model


def require_blocks(model: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """ValueError where these blocks, or the root for what is left, can't be sharded."""
    paths = {part: path for path, part in model.named_modules()}
    for i, block in enumerate(blocks):
        if block is model or block not in paths:
            raise ValueError(
                f"number {i} of the blocks, {type(block).__name__}, is not inside the model: "
                "give modules of the model, inner ones before those around them"
            )
        for j, outer in enumerate(blocks[:i]):
            if block is not outer and block in set(outer.modules()):
                raise ValueError(
                    f"number {i} of the blocks, {type(block).__name__}, is inside number "
                    f"{j}: give inner blocks before those around them"
                )
    taken: set[nn.Parameter] = set()
    for i, unit in enumerate([*blocks, model]):
        inside = set(unit.modules())
        places = places_of(unit, [block for block in blocks[:i] if block in inside])
        if places or unit is not model:
            path = f"{paths[unit]}." if paths[unit] else ""
            require_block(unit, {f"{path}{name}": p for name, p in places.items()}, taken)
        taken |= set(places.values())
    require_one_dtype(list(taken)[:1])  # there is one


class Arrived(Gather):
    """Gather of a block whose whole tensor has come already; the scatter runs on."""

    @staticmethod
    def forward(
        ctx: Any, shard: torch.Tensor, block: "PrefetchingBlock", whole: torch.Tensor
    ) -> torch.Tensor:
        ctx.block = block
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        require_no_graph("Gather")
        ctx.block.scatter(gradient)
        return None, None, None  # `finish` gives the shard its gradient


class PrefetchingBlock(ShardedBlock):
    """As ShardedBlock, but while it computes what its neighbours need is on its way.

    That are their parameters, and the gradient of the block that backward has just left.
    Change a shard by an optimizer or under `no_grad`, which its version counts, and not by
    `.data`: what is already on its way would be taken for the new values. Gradients come
    into `shard.grad` as backward ends, and `torch.autograd.grad` gets none.
    """

    before = after = ()  # the neighbour, where there is one
    coming = work = version = None
    mean = scattering = None

    def begin(self) -> None:
        """Begin to gather this block, unless it is here or on its way."""
        if self.work and self.version != self.shard._version:
            self.reshard()  # an optimizer has stepped: what comes is old
        if self.whole is None and self.work is None:
            mine, self.version = self.shard.detach(), self.shard._version
            self.coming = mine.new_empty(dist.get_world_size(self.group) * len(mine))
            self.work = dist.all_gather_single(
                self.coming, mine, group=self.group, async_op=True
            )

    def scatter(self, gradient: torch.Tensor) -> None:
        """Begin to reduce-scatter the gradient, which runs beside the next block."""
        for block in self.after:
            block.finish()  # so that only one other gradient is whole
        self.finish()
        self.mean = torch.empty_like(self.shard)
        self.scattering = dist.reduce_scatter_single(
            self.mean, gradient, group=self.group, async_op=True
        )
        when_backward_ends(self.finish)

    def finish(self) -> None:
        """Wait for the scatter, if there is one, and add its mean to the shard's gradient."""
        if self.scattering:
            self.scattering.wait()
            self.mean /= dist.get_world_size(self.group)
            if self.shard.grad is not None:
                self.mean += self.shard.grad
            self.shard.grad = self.mean
            self.mean = self.scattering = None

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        self.whole = None  # of a backward that never came to its end
        if backward_number() < 0:  # not called again inside a backward
            self.mean = self.scattering = None  # likewise
        again = self.recomputed and backward_number() >= 0
        for block in (self, *(self.before if again else self.after)):
            block.begin()
        return super().forward(*inputs, **keywords)

    def unpack(self, kept: Any) -> torch.Tensor:
        if not isinstance(kept, torch.Tensor):
            require_unmoved(self.shard, kept[-1])
            for block in (self, *self.before):
                block.begin()
        return super().unpack(kept)

    def unshard(self) -> torch.Tensor:
        self.work.wait()
        whole, self.coming, self.work = self.coming, None, None
        return Arrived.apply(self.shard, self, whole)

    def reshard(self, gradient: torch.Tensor | None = None) -> None:
        if self.work:  # it came for backward, which did not need it
            self.work.wait()
        self.whole = self.coming = self.work = None


def linked(blocks: list[nn.Module]) -> nn.Sequential:
    """The blocks one after the other, each of which knows its neighbours now.

    Raises ValueError for a layer that is no block: nobody would average its gradients.
    """
    for i, block in enumerate(blocks):
        if not isinstance(block, ShardedBlock):
            raise ValueError(
                f"number {i} is {type(block).__name__}, no sharded block: put it into one, "
                "for nobody averages the gradients of what is in none"
            )
    for one, other in pairwise(blocks):
        one.after, other.before = (other,), (one,)
    return nn.Sequential(*blocks)


def ahead(model: nn.Sequential) -> nn.Sequential:
    """Stage 3 whose blocks, the parts of the model, gather and scatter beside compute."""
    fully_sharded(model, list(model), kind=PrefetchingBlock)
    return linked(list(model))
