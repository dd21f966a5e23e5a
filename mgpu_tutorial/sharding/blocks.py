"""ZeRO 3 with one flat tensor a block; the second class sends beside the compute."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from mgpu_tutorial.lab.borrowed import backward_number, when_backward_ends
from mgpu_tutorial.sharding.zero import Gather, flatten, shard_of


def views_of(flat: torch.Tensor, shapes: dict[str, torch.Size]) -> dict[str, torch.Tensor]:
    """The tensors of these shapes, side by side in a flat one, by name."""
    sizes = [shape.numel() for shape in shapes.values()]
    parts = flat[: sum(sizes)].split(sizes)
    pairs = zip(shapes.items(), parts, strict=True)
    return {name: part.view(shape) for (name, shape), part in pairs}


def sharded_call(
    module: nn.Module,
    shard: torch.Tensor,
    shapes: dict[str, torch.Size],
    x: Any,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """The module's output for x, its parameters gathered from shards."""
    whole = Gather.apply(shard, group)
    return functional_call(module, views_of(whole, shapes), (x,))


def blocks_in(model: nn.Module) -> list[nn.Module]:
    """The modules that keep a shard, the model too if it does."""
    return [part for part in model.modules() if hasattr(part, "shard")]


def places_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters, at each place, that no block inside has."""
    inner = {part for block in blocks_in(module) for part in block.modules()}
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
    if not places:
        raise ValueError(f"{type(module).__name__} has no parameters left to shard")
    dtype = next(iter(places.values())).dtype
    for name, parameter in places.items():
        if parameter.dtype != dtype:
            raise ValueError(f"`{name}` is {parameter.dtype}, and others here are {dtype}")
        if hasattr(parameter, "sharded"):
            raise ValueError(f"`{name}` is in another block already, perhaps tied to it")
        if not parameter.requires_grad:
            raise ValueError(
                f"`{name}` is frozen, and a shard trains: fully_shard can keep it"
            )
    first: dict[nn.Parameter, str] = {}
    for name, parameter in places.items():
        first.setdefault(parameter, name)
        parameter.sharded = True  # here too: no other block may take it out
        parent, _, last = name.rpartition(".")
        delattr(module.get_submodule(parent), last)
    shapes = {name: parameter.shape for parameter, name in first.items()}
    shard = shard_of(flatten(first, group), group).clone()
    return shard, shapes, {name: first[parameter] for name, parameter in places.items()}


def name_in_model(path: str, blocks: Mapping[str, nn.Module]) -> str:
    """What the model itself calls a tensor: its path without `module` below each block."""
    steps = path.split(".")
    own = (step for i, step in enumerate(steps) if ".".join(steps[:i]) not in blocks)
    return ".".join(own)


def uncompiled(method: Callable) -> Callable:
    """As torch.compiler.disable, whose import of seconds waits until something compiles."""

    @wraps(method)
    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(method)(*inputs)
        return method(*inputs)

    return call


class FlatShard(nn.Module):
    """Keeps a module's parameters as this rank's shard of a flat tensor: whole in `forward`.

    What autograd keeps of the whole tensor is up to `pack` and `unpack` of a block.
    """

    def __init__(self, module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        inner = {part for block in blocks_in(module) for part in block.modules()}
        shard, self.shapes, self.places = take_out(module, group)
        self.shard = nn.Parameter(shard)
        self.shard.sharded, self.shard.group = True, group
        self.module, self.group = module, group
        self.whole = self.version = None
        self.seen: list[int] = []
        self.register_forward_pre_hook(FlatShard.require_stepped)
        module.register_state_dict_pre_hook(self.refuse)
        for part in module.modules():
            if part not in inner:
                part.register_forward_pre_hook(self.fetch, prepend=True)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        self.gathered()
        with self.hooks():
            output = self.module(*inputs, **keywords)
        self.reshard()
        return output

    @uncompiled
    @torch.enable_grad()
    def gathered(self) -> None:
        """Gather into `whole`; until `reshard` the module's parameters are views of it."""
        whole = self.unshard()
        if whole.requires_grad:
            whole.register_hook(self.reshard)  # once its gradient is complete
        self.whole = whole.detach()  # the same memory, without its graph
        self.version = self.shard._version
        views = views_of(whole, self.shapes)
        for place, name in self.places.items():  # of a tied weight both
            path, _, last = place.rpartition(".")
            setattr(self.module.get_submodule(path), last, views[name])

    def require_stepped(self, *_: Any) -> None:
        """RuntimeError if a step has changed the blocks inside, but not this shard.

        That is what an optimizer of `model.parameters()` does, for the root is around them.
        """
        if torch.compiler.is_compiling():
            return
        before, self.seen = self.seen, [block.shard._version for block in blocks_in(self)]
        (own, *inside), (now, *others) = before or self.seen, self.seen
        if self.shard.grad is not None and own == now and inside != others:
            raise RuntimeError(
                "a step has changed the blocks inside, but not what the root keeps: make the "
                "optimizer of `root.parameters()`"
            )

    def fetch(self, *_: Any) -> None:
        """Before a part computes: outside of `forward`, as in a checkpoint, it gathers."""
        if torch.compiler.is_compiling():
            return
        if self.version != self.shard._version:
            self.gathered()

    def unshard(self) -> torch.Tensor:
        return Gather.apply(self.shard, self.group)

    def reshard(self, gradient: torch.Tensor | None = None) -> None:
        for place in self.places if self.version is not None else ():
            path, _, name = place.rpartition(".")
            delattr(self.module.get_submodule(path), name)
        self.whole = self.version = None

    def refuse(self, module: nn.Module, prefix: str, *_: Any) -> None:
        """Before the module gives its state: alone it would give shards as if all of it."""
        if not prefix:
            raise RuntimeError("here are shards: `root.whole_state()` is the model's state")

    @uncompiled
    def hooks(self) -> AbstractContextManager:
        """`pack` and `unpack`, but in a `checkpoint` none: it decides what autograd keeps."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if top and not isinstance(getattr(top[0], "__self__", None), FlatShard):
            return nullcontext()
        return saved_tensors_hooks(self.pack, self.unpack)

    def whole_tensors(self, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The whole of this rank's shard, or of its gradient, by the module's names."""
        return views_of(Gather.apply(own["shard"].detach(), self.group), self.shapes)

    @torch.no_grad()
    def whole_state(self) -> dict[str, torch.Tensor]:
        """The whole state by the model's own names, on rank 0; all ranks call it.

        Rank 0 gives it to torch.save, or to `root.module.save_pretrained` as `state_dict`.
        """
        every = self.named_modules(remove_duplicate=False)
        blocks = {path: part for path, part in every if hasattr(part, "shard")}
        state = {}
        for path, tensor in self.state_dict().items():
            home, _, name = path.rpartition(".")
            if home not in blocks or name != "shard":
                state[name_in_model(path, blocks)] = tensor.clone()
                continue
            block = blocks[home]
            whole = views_of(Gather.apply(tensor, block.group), block.shapes)
            whole = {name: view.clone() for name, view in whole.items()}
            for place, name in block.places.items():  # of a tied weight each place
                path = f"{home}.module.{place}".removeprefix(".")
                state[name_in_model(path, blocks)] = whole[name]
        return state if dist.get_rank() == 0 else {}

    @torch.no_grad()
    def load_whole_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Each rank takes its shards and the buffers out of a whole state, which all give."""
        every = self.named_modules(remove_duplicate=False)
        blocks = {path: part for path, part in every if hasattr(part, "shard")}
        for path, tensor in self.state_dict().items():
            home, _, name = path.rpartition(".")
            if home not in blocks or name != "shard":
                tensor.copy_(state[name_in_model(path, blocks)])
                continue
            block, inside = blocks[home], f"{home}.module.".removeprefix(".")
            held = []
            for name, shape in block.shapes.items():
                own = name_in_model(f"{inside}{name}", blocks)
                if state[own].shape != shape:
                    raise ValueError(
                        f"`{own}` is {tuple(state[own].shape)}, not {tuple(shape)}"
                    )
                held.append(state[own])
            tensor.copy_(shard_of(flatten(held, block.group), block.group))

    def decay_matrices(self, optimizer: Optimizer, weight_decay: float) -> RemovableHandle:
        """Before each step shrink what has two dimensions or more, as AdamW does.

        Give AdamW itself `weight_decay=0`. The rate is that of its first group of parameters.
        """
        blocks, decayed = blocks_in(self), []
        for block in blocks:
            shapes = block.shapes.values()
            marks = [torch.full(shape, len(shape) > 1) for shape in shapes]
            mine = shard_of(flatten(marks, block.group), block.group)
            decayed.append(mine.to(block.shard.device))

        def decay(optimizer: Optimizer, *_: Any) -> None:
            factor = 1 - optimizer.param_groups[0]["lr"] * weight_decay
            for block, mine in zip(blocks, decayed, strict=True):
                if block.shard.grad is not None:
                    block.shard.data[mine] *= factor

        return optimizer.register_step_pre_hook(decay)

    def requires_grad_(self, requires_grad: bool = True) -> "FlatShard":
        """Freeze or thaw the shards of this block and of those inside."""
        for block in blocks_in(self):
            block.shard.requires_grad_(requires_grad)
        return self

    def __getattr__(self, name: str) -> Any:
        """What the module has, as if there were no block around it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":  # before there is one
                raise
            return getattr(self.module, name)


class ShardedBlock(FlatShard):
    """Whole while it computes, in forward and in backward; a block inside keeps its own."""

    def pack(self, tensor: torch.Tensor) -> Any:
        # of what lies in `whole` autograd keeps the place only
        if tensor.untyped_storage() is not self.whole.untyped_storage():
            return tensor
        place = tensor.shape, tensor.stride(), tensor.storage_offset()
        return *place, self.shard._version

    def unpack(self, kept: Any) -> torch.Tensor:
        # backward asks for it: the first place gathers the block again
        if isinstance(kept, torch.Tensor):
            return kept
        *place, version = kept
        if version != self.shard._version:
            raise RuntimeError("a step between forward and backward")
        if self.whole is None:
            self.gathered()
        return self.whole.as_strided(*place)


def fully_sharded(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    group: dist.ProcessGroup | None = None,
    kind: Callable | None = None,
) -> nn.Module:
    """Each of these blocks of the model becomes sharded, and the root for what is in none.

    Returns the root, or the model itself where nothing is left for it. Inner blocks come
    before those around them. All ranks begin with the same values, and have equally many
    samples in each step. Not general: `prove` it on your model.
    """
    kind = kind or ShardedBlock
    for block in blocks:
        every = model.named_modules(remove_duplicate=False)
        paths = [path for path, part in every if part is block]
        sharded = kind(block, group)
        for path in paths:
            model.set_submodule(path, sharded)
    return kind(model, group) if places_of(model) else model


class Arrived(Gather):
    """Gather of a block whose whole tensor has come already; the scatter runs on."""

    @staticmethod
    def forward(
        ctx: Any, shard: torch.Tensor, block: "ScatteringBlock", whole: torch.Tensor
    ) -> torch.Tensor:
        ctx.block = block
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None]:
        ctx.block.scatter(gradient)
        return None, None, None  # `finish` gives the shard its gradient


class ScatteringBlock(ShardedBlock):
    """As ShardedBlock, but its gradient is scattered while backward goes on.

    Gradients come into `shard.grad` as backward ends, and `torch.autograd.grad` gets none.
    """

    after = before = ()  # the blocks that come next in forward, and in backward
    coming = work = coming_version = None  # a gather that is on its way, if one begins early
    mean = scattering = None

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
        return super().forward(*inputs, **keywords)

    def arrived(self) -> torch.Tensor:
        """The whole flat tensor, gathered now."""
        return Gather.apply(self.shard.detach(), self.group)

    def unshard(self) -> torch.Tensor:
        self.whole = None
        return Arrived.apply(self.shard, self, self.arrived())

    def reshard(self, gradient: torch.Tensor | None = None) -> None:
        if self.work:  # it came for a backward that did not need it
            self.work.wait()
        self.coming = self.work = None
        super().reshard()


class PrefetchingBlock(ScatteringBlock):
    """While it computes, the blocks that come next are on their way.

    Change a shard by an optimizer or under `no_grad`, which its version counts, and not by
    `.data`: what is already on its way would be taken for the new values.
    """

    def begin(self) -> None:
        """Begin to gather this block, unless it is whole or on its way."""
        if self.work and self.coming_version != self.shard._version:
            self.reshard()  # an optimizer has stepped: what comes is old
        if self.whole is None and self.work is None:
            mine = self.shard.detach()
            self.coming = mine.new_empty(dist.get_world_size(self.group) * len(mine))
            self.work = dist.all_gather_single(
                self.coming, mine, group=self.group, async_op=True
            )
            self.coming_version = self.shard._version

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        for block in (self, *self.after):
            block.begin()
        return super().forward(*inputs, **keywords)

    def unpack(self, kept: Any) -> torch.Tensor:
        if not isinstance(kept, torch.Tensor):
            for block in (self, *self.before):
                block.begin()
        return super().unpack(kept)

    def arrived(self) -> torch.Tensor:
        """The whole flat tensor, as soon as it is here."""
        self.begin()
        self.work.wait()
        whole, self.coming, self.work = self.coming, None, None
        return whole


def linked(blocks: Sequence[nn.Module], depth: int = 1) -> nn.Sequential:
    """The blocks in a row; each knows the next `depth` of forward, and those of backward."""
    for i, block in enumerate(blocks):
        block.after = blocks[i + 1 : i + 1 + depth]
        block.before = blocks[max(0, i - depth) : i][::-1]
    return nn.Sequential(*blocks)


def ahead(model: nn.Sequential, depth: int = 1) -> nn.Sequential:
    """Stage 3 whose blocks, the parts of the model, gather and scatter beside compute."""
    fully_sharded(model, list(model), kind=PrefetchingBlock)
    return linked(list(model), depth)
