"""ZeRO 3 with one flat tensor a block; the second class gathers ahead of time."""

from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call

from mgpu_tutorial.sharding.refusals import require_block, require_unmoved
from mgpu_tutorial.sharding.zero import Gather, flatten, shard_of


def views_of(flat: torch.Tensor, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """The tensors of these shapes that lie side by side in a flat one, by name."""
    sizes = [shape.numel() for shape in shapes.values()]
    parts = flat[: sum(sizes)].split(sizes)
    return {name: part.view(shapes[name]) for name, part in zip(shapes, parts, strict=True)}


class ShardedBlock(nn.Module):
    """Keeps one flat shard of a module, which is unsharded while it computes."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        require_block(module)  # not tied, not frozen, of one dtype
        self.shapes = {name: p.shape for name, p in module.named_parameters()}
        self.shard = nn.Parameter(shard_of(flatten(module.parameters())).clone())
        for parameter in (self.shard, *module.parameters()):
            parameter.sharded = True
        for name in self.shapes:  # the module keeps none of its own
            parent, _, last = name.rpartition(".")
            delattr(module.get_submodule(parent), last)
        self.module, self.whole = module, None

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        whole = self.unshard()
        if whole.requires_grad:
            whole.register_hook(self.reshard)
        self.whole = whole.detach()  # the same memory, without its graph
        views = views_of(whole, self.shapes)
        try:
            with saved_tensors_hooks(self.pack, self.unpack):
                return functional_call(self.module, views, inputs, keywords)
        finally:
            self.reshard()

    def unshard(self) -> torch.Tensor:
        return Gather.apply(self.shard)

    def reshard(self, gradient: torch.Tensor | None = None) -> None:
        self.whole = None

    def pack(self, tensor: torch.Tensor) -> Any:
        """Autograd would keep a tensor: of a view of `whole` it keeps the place only."""
        memory = self.whole.untyped_storage()
        if tensor.untyped_storage() is not memory:
            return tensor
        place = tensor.shape, tensor.stride(), tensor.storage_offset()
        return place, self.shard._version  # which counts the steps

    def unpack(self, kept: Any) -> torch.Tensor:
        """Backward asks for what was kept: the first place gathers the block again."""
        if isinstance(kept, torch.Tensor):
            return kept
        place, version = kept
        require_unmoved(self.shard, version)
        if self.whole is None:
            self.whole = self.unshard().detach()
        return self.whole.as_strided(*place)


class Arrived(Gather):
    """Gather, where the whole tensor has come already."""

    @staticmethod
    def forward(ctx: Any, shard: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Gather.backward(ctx, gradient), None


class PrefetchingBlock(ShardedBlock):
    """As ShardedBlock, but while it computes its neighbour's parameters are on their way."""

    before = after = ()  # the neighbour, where there is one
    coming = work = version = None

    def begin(self) -> None:
        """Begin to gather this block, unless it is here or on its way."""
        if self.work and self.version != self.shard._version:
            self.reshard()  # an optimizer has stepped: what comes is old
        if self.whole is None and self.work is None:
            mine, self.version = self.shard.detach(), self.shard._version
            self.coming = mine.new_empty(dist.get_world_size() * len(mine))
            self.work = dist.all_gather_single(self.coming, mine, async_op=True)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        self.whole = None  # of a backward that never came to its end
        for block in (self, *self.after):
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
        return Arrived.apply(self.shard, whole)

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
