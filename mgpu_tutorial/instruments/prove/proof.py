"""Does a parallel job compute what one process computes? One file, which needs torch alone.

    python proof.py 4 train.py --its --own=words

starts a training script by torchrun on one rank, on one rank with every number a unit in the
last place off, which says how far rounding goes, and on four, and compares the tensors of its
first two steps. In a notebook `prove(train, 4, …)` does the same with a worker. Behind
torchrun, `torchrun … proof.py 8 train.py`, the ranks are torchrun's, on several machines too.

The job runs unchanged. What a rank computes is noted while it runs, and put together when it
has ended: till then nothing is sent. A model is seen where `watched(model)` is called, before
it is wrapped or cut, else at its first forward. There it takes a dtype, and small random
numbers are added to its parameters, since faults do not show where a weight is 0 or 1.

Whole tensors come from DTensors, from a parameter with `cut` and `group` (this rank's part
along that dimension, as long as the others'), and from any module with a method
`whole_tensors(own)`. It gets its own parameters, or tensors of their shapes, by name, and
returns whole ones by the names that they have in one process. A parameter in no module may
have such a method too: it gets its own tensor, and returns one for each parameter that is in
a module. All ranks of a group call it together.
"""

import argparse
import contextlib
import functools
import gc
import hashlib
import math
import os
import runpy
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import run as torchrun
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules import module as hooks
from torch.nn.utils import clip_grad
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC2701
from torch.utils.hooks import RemovableHandle

NOISE = 0.05  # is added to all parameters, in units of a standard normal number
BOUNDS = 1e-12, 1e-4, 0.1, 1.0, math.inf  # of what is printed
TIMES = 8  # as far as rounding moves a tensor, so many times may it be off
ROWS, ALL_ROWS = 256, 2**16  # of an output that are kept: on ranks, and in one process
AROUND = "module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module."
HOME = "path_in_one_process"  # an attribute of modules, which deep copies keep

Groups = dict[str, list[list[int]]]  # by a name, the ranks that belong together
Whole = dict[str, list[Tensor | None]]  # by a name, what one rank has of it: mostly one


# What one rank notes


class Step(NamedTuple):
    """Whole gradients before they are clipped, at an optimizer's step, and what it leaves."""

    gradients: Whole
    clipped: Whole  # the same, if nothing has clipped them
    parameters: Whole


class Notes(NamedTuple):
    """What one rank has seen of a job."""

    start: Whole  # parameters before the first step
    steps: list[Step]
    outputs: list[dict[str, Tensor]]  # of modules, in the forwards of each step: rows
    buffers: Whole
    returned: list[Tensor]
    alike: dict[str, str]  # the other names of tied parameters
    facts: set[str]  # what often is a cause
    groups: Groups
    eps: float  # of the coarsest numbers inside
    taken: int  # how many steps it took, 0 if it has no optimizer
    left: list[str]  # what has a gradient, and no optimizer steps it


_watches: list["Watch"] = vars(sys).setdefault("watches_of_a_proof", [])


class Enough(BaseException):
    """The steps that were asked for are done. No program catches it by mistake."""


def watched(model: nn.Module) -> nn.Module:
    """The same model, whole, before it is wrapped or cut; noted in a proof alone."""
    return _watches[-1].begin(model) if _watches else model


@contextlib.contextmanager
def watching(
    dtype: torch.dtype | None = None, moved: bool = False, steps: int = 0
) -> Iterator["Watch"]:
    """Watch the job that runs inside.

    dtype   of models, and the usual one; None leaves both as they are
    moved   each parameter begins a unit in the last place off, and operations are looked at
    steps   after so many the job is left by `Enough`; 0: never
    """
    watch, usual = Watch(dtype, moved, steps), torch.get_default_dtype()
    if dtype:
        torch.set_default_dtype(dtype)
    handles = [
        hooks.register_module_forward_pre_hook(watch.enters),
        hooks.register_module_forward_hook(watch.leaves, always_call=True),
        register_optimizer_step_pre_hook(watch.before_step),
    ]
    clips = [
        (home, name, clip)
        for home in (nn.utils, clip_grad)  # programs import from either
        for name, clip in vars(home).items()
        if "clip_grad" in name and isinstance(clip, FunctionType)
    ]
    for home, name, clip in clips:
        setattr(home, name, watch.keeping(clip))
    _watches.append(watch)
    try:
        with watch.seeing if moved else contextlib.nullcontext():
            yield watch
    finally:
        for home, name, clip in clips:
            setattr(home, name, clip)
        _watches.pop()
        torch.set_default_dtype(usual)
        for handle in handles + watch.handles:
            handle.remove()


class Watch:
    """Looks at models and optimizers of this process; `notes()` says what it has seen."""

    def __init__(self, dtype: torch.dtype | None, moved: bool, steps: int) -> None:
        self.dtype, self.moved, self.enough = dtype, moved, steps
        self.models: list[nn.Module] = []
        self.is_watched = False  # a whole model was seen before it was wrapped or cut
        self.names: dict[Tensor, str] = {}
        self.entered: set[nn.Module] = set()  # modules that this rank computes with
        self.depth = 0  # of the forwards that run
        self.alike: dict[str, str] = {}
        self.gradients: dict[Tensor, list[Tensor | None]] = {}  # one for each step
        self.clipped: dict[Tensor, list[Tensor | None]] = {}  # those that were stepped with
        self.unclipped: dict[Tensor, Tensor] = {}  # in the step that comes
        self.start: dict[Tensor, Tensor] = {}  # all parameters, before the first step
        self.values: list[dict[Tensor, Tensor]] = []  # and after each
        self.stepped: set[Tensor] = set()  # in the step that runs
        self.handles: list[RemovableHandle] = []  # of the hook that runs last
        self.outputs: list[dict[str, list[Tensor]]] = []  # one for each step
        self.facts: set[str] = set()
        self.seeing = Seeing(self)

    # While the job runs

    def begin(self, model: nn.Module, is_whole: bool = True) -> nn.Module:
        """Name the parameters of a model and disturb them, once."""
        if any(model is other for other in self.models):
            name_homes(model)  # of what has come in since
            return model
        self.models.append(model)
        self.is_watched |= is_whole
        if is_whole and self.dtype:
            model.to(self.dtype)
        name_homes(model)
        if self.is_watched and not is_whole:
            return model  # it is made of what was watched
        known = {p for part in model.modules() for p in parts_in(part)} | self.names.keys()
        names: dict[Tensor, str] = {}
        for path, p in model.named_parameters(remove_duplicate=False):
            if p in names:
                self.alike[plain(path)] = names[p]
                continue
            names[p] = plain(path)
            if p not in known and not p.is_meta and p.is_floating_point():
                self.disturb(p, names[p])
        self.names = names | self.names
        return model

    def disturb(self, parameter: nn.Parameter, name: str) -> None:
        """Add the numbers that belong to a name: the same, on whatever ranks it lies."""
        numbers = torch.Generator().manual_seed(seed_of(name))
        shape, ranks = list(parameter.shape), 1
        if hasattr(parameter, "cut"):
            ranks = size_of(parameter.group)
            shape[parameter.cut] *= ranks
        more = {"generator": numbers, "device": "cpu"}
        noise = NOISE * torch.randn(shape, dtype=torch.float64, **more)
        signs = torch.randint(2, shape, **more).double() * 2 - 1
        mine = parameter.data
        if isinstance(mine, DTensor):
            mesh, places = mine.device_mesh, mine.placements
            mine = mine.to_local()
            noise, signs = (
                distribute_tensor(
                    t.to(mine.device), mesh, places, src_data_rank=None
                ).to_local()
                for t in (noise, signs)
            )
        elif ranks > 1:
            rank = dist.get_rank(parameter.group)
            noise, signs = (t.chunk(ranks, parameter.cut)[rank] for t in (noise, signs))
        mine += noise.to(mine)
        if self.moved:
            mine.copy_(torch.nextafter(mine, (math.inf * signs).to(mine)))

    def enters(self, module: nn.Module, inputs: Any) -> None:
        """A forward begins. What is compiled is not looked at: the modules inside vanish."""
        if torch.compiler.is_compiling():
            return
        if self.depth == 0:
            self.begin(module, is_whole=False)
            self.unclipped.clear()  # of a step that was left out
        self.depth += 1
        self.entered.add(module)
        if module.training and "BatchNorm" in type(module).__name__:
            self.facts.add("BatchNorm")
        if getattr(module, "max_norm", None) and isinstance(module, nn.Embedding):
            self.facts.add("max_norm")

    def leaves(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """A forward ends: keep rows of its output in the first steps."""
        if torch.compiler.is_compiling():
            return
        self.depth -= 1
        home = vars(module).get(HOME)
        now = len(self.values) + bool(self.stepped)
        if home is None or now >= (self.enough or 2) or not torch.is_grad_enabled():
            return
        self.outputs += [{} for _ in range(now + 1 - len(self.outputs))]
        for t in tensors_in(output)[:1]:
            if t.dim() and t.is_floating_point() and not isinstance(t, DTensor):
                rows = (
                    t.detach()
                    .reshape(-1, t.shape[-1])[: ROWS if size_of() > 1 else ALL_ROWS]
                    .cpu()
                    .clone()
                )
                self.outputs[now].setdefault(home, []).append(rows)

    def keeping(self, clip: Callable) -> Callable:
        """A function that clips, but keeps the gradients as they are before it."""

        @functools.wraps(clip)
        def clips(parameters: Any, *given: Any, **more: Any) -> Any:
            self.facts.add("clip")
            each = [parameters] if isinstance(parameters, Tensor) else list(parameters)
            for p in each:
                if p.grad is not None and p not in self.unclipped:
                    self.unclipped[p] = kept_of(p.grad)
            return clip(each, *given, **more)

        return clips

    def before_step(self, optimizer: Optimizer, *given: Any) -> None:
        """An optimizer is about to step: its own hooks come first, which clip or average."""
        own = {p for group in optimizer.param_groups for p in group["params"]}
        if own & self.stepped:  # so another step begins
            self.values.append(self.parameters())
            self.stepped.clear()
            if len(self.values) == self.enough:
                raise Enough
        if not self.start:
            self.start = self.parameters()
        self.stepped |= own
        for handle in self.handles:
            handle.remove()
        self.handles = [optimizer.register_step_pre_hook(self.note_gradients)]

    def note_gradients(self, optimizer: Optimizer, *given: Any) -> None:
        """Keep the gradients with which an optimizer steps, and as they were unclipped."""
        now = len(self.values)
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            last = None if p.grad is None else kept_of(p.grad)
            for place, t in (
                (self.gradients, self.unclipped.pop(p, last)),
                (self.clipped, last),
            ):
                kept = place.setdefault(p, [])
                kept += [None] * (now - len(kept))
                if len(kept) == now:
                    kept.append(t)

    def parameters(self) -> dict[Tensor, Tensor]:
        """All parameters as a step has left them; owners have sent theirs by now."""
        every = [p for model in self.models for p in model.parameters()]
        every = dict.fromkeys([*every, *self.gradients])
        return {p: kept_of(p) for p in every if is_there(p)}

    # When the job has ended

    def notes(self, returned: Any = None) -> Notes:
        """Put whole tensors together; every rank calls it, once."""
        taken = len(self.values) + 1 if self.stepped else 0
        self.values.append(self.parameters())
        if not self.gradients:  # no optimizer of torch has stepped: what there is at the end
            every = (p for model in self.models for p in model.parameters())
            self.clipped = {p: [kept_of(p.grad)] for p in every if p.grad is not None}
            self.gradients = {
                p: [self.unclipped.get(p, last)] for p, (last,) in self.clipped.items()
            }
        steps = []
        for number, values in enumerate(self.values):
            first, last = (
                {p: g[number] for p, g in kept.items() if len(g) > number}
                for kept in (self.gradients, self.clipped)
            )
            steps.append(Step(*map(self.whole, (first, last, values))))
        outputs = [
            {
                name: torch.cat(several)
                for name, several in of_step.items()
                if len({rows.shape[1] for rows in several}) == 1
            }
            for of_step in self.outputs
        ]
        if not self.is_watched:
            self.facts.add("unwatched")
        given = [t.detach().cpu() for t in tensors_in(returned)]
        every = (p for model in self.models for p in model.parameters())
        left = {p: p.grad for p in every if p.grad is not None and p not in self.gradients}
        left = [*self.whole(left)] if taken else []
        about = self.alike, self.facts, groups_of_meshes(), self.seeing.eps, taken, left
        return Notes(self.whole(self.start), steps, outputs, self.buffers(), given, *about)

    def buffers(self) -> Whole:
        """The floating buffers by their names in one process, where this rank computes."""
        found: Whole = {}

        def walk(part: nn.Module, is_used: bool) -> None:
            is_used |= part in self.entered
            for name, t in part.named_buffers(recurse=False) if is_used else ():
                if t.is_floating_point() and not isinstance(t, DTensor) and not t.is_meta:
                    home = joined(vars(part).get(HOME, ""), name)
                    found.setdefault(home, [t.cpu().clone()])
            for child in part.children():
                walk(child, is_used)

        for model in self.models:
            walk(model, False)
        return found

    def whole(self, kept: dict[Tensor, Tensor | None]) -> Whole:
        """Whole tensors by their names in one process, of what was kept of parameters."""
        found: Whole = {}
        done: set[Tensor] = set()

        def walk(module: nn.Module, path: str) -> None:
            path = vars(module).get(HOME, path)
            own = {n: p for n, p in own_parameters(module).items() if p in kept}
            own = {n: p for n, p in own.items() if p not in done}
            done.update(own.values())
            if own and (
                module in self.entered or any(p in self.gradients for p in own.values())
            ):
                if hasattr(type(module), "whole_tensors"):
                    given = {
                        n: zeros(p) if kept[p] is None else kept[p] for n, p in own.items()
                    }
                    for name, t in module.whole_tensors(given).items():
                        found.setdefault(home_of(module, path, name), []).append(t.cpu())
                else:
                    for name, p in own.items():
                        whole = put_together(p, kept[p])
                        found.setdefault(joined(path, name), []).append(whole)
            for name, child in module.named_children():
                walk(child, joined(path, name))

        # what is stepped comes first: it may be a copy of what was watched
        trained = [m for m in self.models if any(p in self.gradients for p in m.parameters())]
        for model in [*trained, *self.models]:
            walk(model, "")
        rest = [p for p in kept if p not in done and p in self.gradients]
        for number, p in enumerate(rest):
            whole = {p: kept[p]}
            if hasattr(p, "whole_tensors"):
                whole = p.whole_tensors(zeros(p) if kept[p] is None else kept[p])
            for q, t in whole.items():
                name = self.names.get(q, f"parameter {number} in no module")
                found.setdefault(name, []).append(t)
        return found


class Seeing(TorchDispatchMode):
    """Sees operations: the coarsest numbers inside, random ones, and how losses count."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch, self.eps = watch, 0.0

    def __torch_dispatch__(
        self, op: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Do what was asked for, and look at it."""
        out, name, facts = op(*args, **(kwargs or {})), str(op), self.watch.facts
        if "nll_loss" in name and "backward" not in name:
            target, weight, reduction, ignored = args[1:5]
            if weight is not None:
                facts.add("weights")
            if reduction == 2:
                facts.add("sum")
            if bool((target == ignored).any()):
                facts.add("ignored")
        if not self.watch.depth and ("_foreach_norm" in name or "vector_norm" in name):
            facts.add("norm")
        if self.watch.depth:
            if any(word in name for word in ("bernoulli", "dropout", "aten.rand")):
                facts.add("random")
            for t in tensors_in(out):
                if t.is_floating_point() and t.numel() > 1:
                    self.eps = max(self.eps, torch.finfo(t.dtype).eps)
        return out


def plain(path: str) -> str:
    """A path without what wrappers add to it."""
    path = f"{path}."
    for word in AROUND:
        path = path.replace(f".{word}", ".").removeprefix(word)
    return path.removesuffix(".")


def name_homes(module: nn.Module, path: str = "") -> None:
    """Give each module its path in one process, unless it has one."""
    path = vars(module).setdefault(HOME, path)
    for name, child in module.named_children():
        name_homes(child, joined(path, name))


def parts_in(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module that alone knows how they become whole."""
    knows = hasattr(type(module), "whole_tensors")
    return list(own_parameters(module).values()) if knows else []


def joined(path: str, name: str) -> str:
    """The name of a part of what stands at a path."""
    return plain(f"{path}.{name}" if path else name)


def seed_of(name: str) -> int:
    """A number that stands for a name."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6], "big")


def size_of(group: Any = None) -> int:
    """The number of ranks in a group; 1 where there is none at all."""
    return dist.get_world_size(group) if dist.is_initialized() else 1


def kept_of(t: Tensor) -> Tensor:
    """A tensor as it is now; of a DTensor this rank's part as one."""
    return t.detach().clone()


def is_there(t: Tensor) -> bool:
    """False for a tensor whose memory was given back, as fully_shard does with whole ones."""
    is_part = isinstance(t, DTensor) or not t.numel()
    return is_part or t.is_meta or t.untyped_storage().nbytes() > 0


def zeros(parameter: Tensor) -> Tensor:
    """A gradient of nothing."""
    return torch.zeros_like(parameter.detach())


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's own; with `whole_tensors` those below too, but for others like it."""
    if not hasattr(type(module), "whole_tensors"):
        return dict(module.named_parameters(recurse=False))
    below = [part for part in module.modules() if part is not module]
    units = [part for part in below if hasattr(type(part), "whole_tensors")]
    theirs = {p for unit in units for p in unit.parameters()}
    return {name: p for name, p in module.named_parameters() if p not in theirs}


def home_of(module: nn.Module, path: str, name: str) -> str:
    """The name in one process of what a module gives, by the part in which it stands."""
    parent, _, last = name.rpartition(".")
    for root in (module, getattr(module, "module", None)):
        with contextlib.suppress(AttributeError, KeyError):
            return joined(vars(root.get_submodule(parent))[HOME], last)
    return joined(path, name)


def put_together(parameter: Tensor, own: Tensor | None) -> Tensor | None:
    """The whole of this rank's part of a parameter, or of its gradient."""
    if isinstance(parameter, DTensor):
        return (zeros(parameter) if own is None else own).full_tensor().cpu()
    if not hasattr(parameter, "cut"):
        return None if own is None else own.cpu()
    own = (zeros(parameter) if own is None else own).contiguous()
    parts = [torch.empty_like(own) for _ in range(size_of(parameter.group))]
    dist.all_gather(parts, own, group=parameter.group)
    return torch.cat(parts, parameter.cut).cpu()


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors and floats in nested lists, tuples and dicts, in their order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, float):
        return [torch.tensor(value, dtype=torch.float64)]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [t for part in value for t in tensors_in(part)]
    return []


def groups_of_meshes() -> Groups:
    """The dimensions of this process's meshes over all ranks, by their names."""
    found: Groups = {}
    for mesh in [each for each in gc.get_objects() if type(each) is DeviceMesh]:
        names = mesh.mesh_dim_names or ()
        if mesh.mesh.numel() == size_of() and len(names) == mesh.mesh.dim():
            for number, name in enumerate(names):
                rows = mesh.mesh.movedim(number, -1).reshape(-1, mesh.mesh.shape[number])
                found[name] = rows.tolist()
    return found


# The ranks beside one process


SUSPECTS = {
    "start": "first numbers differ on the ranks: one seed for all, or rank 0's are sent",
    "tie": "tied in one process, and not on the ranks: tie them there, before watched(model)",
    "BatchNorm": "a BatchNorm sees the samples of one rank: SyncBatchNorm sees all",
    "max_norm": "an Embedding with max_norm changes its weight in forward",
    "weights": "a mean over ranks is wrong where each divided by its own sum of weights",
    "ignored": "targets are ignored, and a mean of means is wrong where counts differ",
    "norm": "gradients are clipped, and of parts a rank knows only its own squares",
    "sum": "the loss is a sum, which a mean over ranks divides by their number",
}
UNWATCHED = (
    "modules have other names on the ranks: call watched(model) before it is wrapped or cut, "
    "and prove again"
)
RANDOM = (
    "random numbers are drawn in forward, as dropout does, and ranks draw others than one "
    "process: prove it without them, for behind them nothing can be told"
)


class Row(NamedTuple):
    """One tensor at one moment: how far off it is, and if it is wrong what it is."""

    when: str  # "gradients of step 1"
    name: str
    off: float  # in parts of its norm in one process, or of the largest one if it has none
    limit: float
    kind: str = ""  # "" if it is right
    more: str = ""  # what would be right, or whose


class Proof:
    """The outcome: `right`, all `rows` in the order of the job, and `str()` of it."""

    def __init__(self, ranks: int, rows: list[Row], remarks: list[str]) -> None:
        self.ranks, self.rows, self.remarks = ranks, rows, remarks
        self.wrong = [row for row in rows if row.kind]
        self.right = not self.wrong

    @property
    def first(self) -> Row | None:
        """The first wrong tensor: of the first moment with one, the nearest to the loss."""
        return self.wrong[0] if self.wrong else None

    @property
    def tensors(self) -> int:
        """How many tensors of the model were compared."""
        return len(
            {r.name for r in self.rows if r.when.startswith(("gradients", "parameters"))}
        )

    def furthest(self, moments: str) -> float:
        """How far off the furthest tensor is, at all moments whose names begin like this."""
        return max((r.off for r in self.rows if r.when.startswith(moments)), default=0.0)

    def lines(self) -> list[str]:
        """One line if all is right, else the first moment's wrong tensors by their kinds."""
        if self.right:
            words = [w for w in ("gradients", "parameters") if self.of(w)]
            words = words or ["values returned"]
            far = ", ".join(
                f"{w} within {bound_of(self.furthest(w.split()[0]))}" for w in words
            )
            what = f"{self.tensors} tensors " if self.tensors else ""
            return [
                f"{what}as one process on {count(self.ranks, 'rank')}: {far}",
                *self.remarks,
            ]
        there = [row for row in self.rows if row.when == self.first.when]
        kinds: dict[str, list[Row]] = {}
        for row in (row for row in there if row.kind):
            kinds.setdefault(row.kind, []).append(row)
        wrong = sum(map(len, kinds.values()))
        lines = [f"not as one process: {wrong} of {len(there)} {self.first.when}"]
        for kind, rows in list(kinds.items())[:3]:
            others = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
            more = f": {rows[0].more}" if rows[0].more else ""
            lines.append(f"  {rows[0].name}{others}: {kind}{more}")
        if len(kinds) > 3:
            lines.append(f"  and {count(len(kinds) - 3, 'kind')} more")
        return lines + self.remarks

    def of(self, moments: str) -> list[Row]:
        """The rows of all moments whose names begin like this."""
        return [row for row in self.rows if row.when.startswith(moments)]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    __repr__ = __str__


class Limits(NamedTuple):
    """What is known of the ranks and of rounding while tensors are compared."""

    eps: float  # of the coarsest numbers inside
    groups: Groups
    ranks: int

    def of(self, right: Tensor, moved: Tensor | None, largest: float = 0.0) -> float:
        """How far off a tensor can be by rounding."""
        limit = self.eps * (TIMES * norm_of(right) + largest / TIMES) + 1e-300
        if moved is not None and moved.shape == right.shape:
            limit += TIMES * norm_of(moved.double() - right.double())
        return limit


def compare(one: Notes, moved: Notes, ranks: Sequence[Notes]) -> Proof:
    """One process, the same with every number moved, and the ranks of a job."""
    ranks = with_steps_of_others(ranks)
    there = [t for step in one.steps for each in step for ts in each.values() for t in ts]
    there = [t for t in (*there, *one.returned) if t is not None and t.is_floating_point()]
    eps = max(moved.eps, *(torch.finfo(t.dtype).eps for t in there), 2.0**-52)
    groups = {name: rows for notes in ranks for name, rows in notes.groups.items()}
    limits, rows = Limits(eps, groups, len(ranks)), []
    starts = [by_first_name(notes.start, one.alike) for notes in ranks]
    rows += rows_of("parameters at the start", one.start, moved.start, starts, limits, False)
    clips = all("clip" in notes.facts for notes in (one, *ranks))
    before = one.start, first_of(starts)
    for number in range(min(len(notes.steps) for notes in (one, *ranks))):
        step = f"step {number + 1}"
        moments = {f"gradients of {step}": 1, f"parameters after {step}": 2}
        if clips:
            unclipped = {
                f"gradients of {step}, before clipping": 0,
                f"clipped gradients of {step}": 1,
            }
            moments = unclipped | {f"parameters after {step}": 2}
        for when, part in moments.items():
            first, other = (notes.steps[number][part] for notes in (one, moved))
            own = [by_first_name(notes.steps[number][part], one.alike) for notes in ranks]
            found = rows_of(when, first, other, own, limits)
            if part == 2:
                found = by_change(found, first, other, first_of(own), before, limits)
                before = first, first_of(own)
            rows += found
    buffers = [
        {n: t for n, t in notes.buffers.items() if n in one.buffers} for notes in ranks
    ]
    rows += rows_of_steps(one, ranks)
    rows += rows_of("buffers", one.buffers, moved.buffers, buffers, limits, is_strict=False)
    rows += rows_returned(one, moved, ranks, limits)
    remarks = []
    if wrong := [row for row in rows if row.kind]:
        first = wrong[0].when
        facts = one.facts.union(moved.facts, *(notes.facts for notes in ranks))
        if first.endswith("at the start"):
            tied, at_start = one.alike.values(), [r for r in wrong if r.when == first]
            why = "tie" if all(row.name in tied for row in at_start) else "start"
            is_moved = all("order" in row.kind for row in at_start)
            facts = facts & {"max_norm"} or ({why} if not is_moved else set())
        if clips and not first.startswith("clipped"):
            facts.discard("norm")  # which clipping took
        if all(" times " in row.kind for row in wrong if row.when == first):
            facts -= {"ignored", "weights"}  # a mean of means has another direction
        lost = any(row.kind in {"not there", "another name"} for row in wrong)
        if lost and any("unwatched" in notes.facts for notes in ranks):
            remarks.append(UNWATCHED)
            facts.discard("start")
        else:
            remarks += in_forward(one, moved, ranks, limits, wrong[0])
        remarks += [f"suspect: {says}" for fact, says in SUSPECTS.items() if fact in facts]
        remarks = [RANDOM] if "random" in facts else remarks
    elif one.steps[0].gradients and len(one.steps) < 2:
        remarks.append("one step was seen: take two, for what begins at the second")
    if left := next((notes.left for notes in (one, *ranks) if notes.left), []):
        others = f" and {len(left) - 1} more" if len(left) > 1 else ""
        remarks.append(f"no optimizer has {left[0]}{others}, though it gets a gradient")
    return Proof(len(ranks), rows, remarks)


def with_steps_of_others(ranks: Sequence[Notes]) -> list[Notes]:
    """Of a rank without an optimizer, for which others step, the end of the last step."""
    most = max(notes.taken for notes in ranks)
    return [
        notes
        if notes.taken or not most
        else notes._replace(
            steps=[Step({}, {}, {})] * (most - 1) + [Step({}, {}, notes.steps[-1].parameters)]
        )
        for notes in ranks
    ]


def rows_of_steps(one: Notes, ranks: Sequence[Notes]) -> list[Row]:
    """A row for the first rank whose number of steps is not that of one process."""
    for rank, notes in enumerate(ranks):
        if notes.taken not in {0, one.taken}:
            more = f"{notes.taken} on rank {rank}, expected {one.taken}"
            kind = "another number of steps"
            return [Row("steps of the optimizer", "the job", math.inf, 0.0, kind, more)]
    return []


def first_of(ranks: Sequence[Whole]) -> Whole:
    """By its name, what the first rank has that has it."""
    return {name: tensors for own in reversed(ranks) for name, tensors in own.items()}


def by_first_name(own: Whole, alike: dict[str, str]) -> Whole:
    """The same, where the second name of a tied parameter stands for the first."""
    found: Whole = {}
    for name, tensors in own.items():
        found.setdefault(alike.get(name, name), []).extend(tensors)
    return found


def rows_of(
    when: str,
    one: Whole,
    moved: Whole,
    ranks: list[Whole],
    limits: Limits,
    is_strict: bool = True,
) -> list[Row]:
    """A row for each tensor, beginning with the last, which is nearest to the loss.

    Where it is not strict, a rank may have none of a tensor, and others.
    """
    rows = []
    largest = max(
        (norm_of(t) for ts in one.values() for t in ts if t is not None), default=0.0
    )
    for name, (right, *_) in reversed(one.items()):
        found = [(r, t) for r, own in enumerate(ranks) for t in own.get(name, [])]
        given = [t for _, t in found if t is not None]
        is_nothing = all(t is None or not t.any() for t in (right, *given))
        if is_nothing and (found or right is None):
            rows.append(Row(when, name, 0.0, 0.0))
        elif right is None:
            why = "one process gives it none: is it frozen there, or unused?"
            rows.append(Row(when, name, math.inf, 0.0, "has a gradient", why))
        elif not given and is_strict:
            kind = "not there" if when.startswith("parameters") else "no gradient"
            why = "is it frozen, unused, in no optimizer, or under another name?"
            rows.append(Row(when, name, math.inf, 0.0, kind, why))
        elif given:
            found = [(r, without_padding(t, right)) for r, t in found]
            given = [t for _, t in found if t is not None]
            limit = limits.of(right, moved.get(name, [None])[0], largest)
            kind, more = kind_of(right, found, limit, limits)
            far = [
                norm_of(t.double() - right.double()) for t in given if t.shape == right.shape
            ]
            norm = norm_of(right)
            norm = norm if norm > limit else largest or 1.0  # if it is but rounding
            rows.append(
                Row(when, name, max(far, default=math.inf) / norm, limit / norm, kind, more)
            )
    others = dict.fromkeys(name for own in ranks for name in own if name not in one)
    for name in others if is_strict else ():
        if any(t is not None and t.any() for own in ranks for t in own.get(name, [])):
            why = "one process has none: call watched(model) before it is wrapped or cut"
            rows.append(Row(when, name, math.inf, 0.0, "another name", why))
    return rows


def by_change(
    rows: list[Row],
    one: Whole,
    moved: Whole,
    own: Whole,
    before: tuple[Whole, Whole],
    limits: Limits,
) -> list[Row]:
    """The same rows, but of parameters that a step has moved too far, or not at all.

    `own` are those of the first rank that has them, `before` one process's and theirs
    before the step.
    """
    found = []
    for row in rows:
        name, row_by_change = row.name, row
        four = [each.get(name, [None])[0] for each in (one, before[0], own, before[1])]
        if row.kind == "another direction" and all(t is not None for t in four):
            right, start, t, begun = (without_padding(t, four[0]).double() for t in four)
            limit = limits.of(four[0], moved.get(name, [None])[0])
            if right.shape == start.shape == t.shape == begun.shape:
                row_by_change = changed(row, right - start, t - begun, limit)
        found.append(row_by_change)
    return found


def changed(row: Row, r: Tensor, t: Tensor, limit: float) -> Row:
    """A parameter's row by what a step has changed of it; the same if that is no factor."""
    factor = (t * r).sum().item() / (norm_of(r) ** 2 or math.inf)
    if norm_of(r) <= 4 * limit or norm_of(t - factor * r) > limit * max(abs(factor), 1.0):
        return row
    if norm_of(t) <= limit:
        more = "does an optimizer step it, and does its owner send it?"
        return row._replace(kind="not changed", more=more)
    more = "is it stepped as often, and at the same learning rate?"
    return row._replace(kind=f"changed {factor:.4g} times as much", more=more)


def without_padding(t: Tensor | None, right: Tensor) -> Tensor | None:
    """A tensor without zeros behind it, such as those of a vocabulary that ranks share."""
    if t is None or t.dim() != right.dim():
        return t
    inner = t[tuple(map(slice, right.shape))]
    return inner if t.count_nonzero() == inner.count_nonzero() else t


def kind_of(
    right: Tensor, found: list[tuple[int, Tensor | None]], limit: float, limits: Limits
) -> tuple[str, str]:
    """What the ranks have in place of one tensor, and what would be right; "" if it is."""
    for _, t in found:
        if t is not None and t.shape != right.shape:
            sizes = f"{tuple(t.shape)}, expected {tuple(right.shape)}"
            is_longer = t.dim() == right.dim() and t.numel() > right.numel()
            padded = ": what lies beyond is not zero, as padding should be"
            return "another shape", sizes + padded * is_longer
    bits = [(r, torch.zeros_like(right) if t is None else t) for r, t in found]
    r, every = right.double(), [(rank, t.double()) for rank, t in bits]
    strange = [rank for rank, t in every if not t.isfinite().all()]
    if not r.isfinite().all():
        return "not finite", "nor in one process: prove it where all numbers are finite"
    if strange:
        return "not finite", f"on {the_ranks(strange)}"
    near = [norm_of(t - r) <= limit for _, t in every]
    differ = [rank for rank, t in bits if not torch.equal(t, bits[0][1])]
    if all(near):
        if not differ:
            return "", ""
        return "right, but not the same bits", f"{the_ranks(differ)} beside rank {bits[0][0]}"
    sums = [sum(t for other, t in every if other == rank) for rank in {k for k, _ in every}]
    if len(sums) < len(every) and all(norm_of(s - r) <= limit for s in sums):
        return "two tensors where one was tied", "the sum of both would be right"
    if differ:
        if over := over_which(every, r, limit, limits):
            return over
        if any(near):
            bad = [pair for pair, is_near in zip(every, near, strict=True) if not is_near]
            kind, more = kind_of_one(r, bad[0][1], limit, limits)
            where = f"on {the_ranks([rank for rank, _ in bad])}"
            return f"{kind} {where}", more or "right on the others"
    kind, more = kind_of_one(r, every[0][1], limit, limits)
    return kind, f"{more}, and the ranks differ".removeprefix(", ") if differ else more


def over_which(
    every: list[tuple[int, Tensor]], r: Tensor, limit: float, limits: Limits
) -> tuple[str, str] | None:
    """The group whose sum or mean would be right, if there is one."""
    for name, rows in (limits.groups | unnamed(limits.ranks)).items():
        parts = [[t for rank, t in every if rank in row] for row in rows]
        parts = [part for part in parts if part]
        if any(len(part) < 2 for part in parts):
            continue
        over = f"the {len(parts[0])} ranks of {name}" if name in limits.groups else name
        sums = [sum(part) for part in parts]
        if all(norm_of(s - r) <= limit * len(p) for s, p in zip(sums, parts, strict=True)):
            return "never summed", f"the sum over {over} would be right"
        if all(norm_of(s / len(p) - r) <= limit for s, p in zip(sums, parts, strict=True)):
            return "never averaged", f"the mean over {over} would be right"
    return None


def kind_of_one(r: Tensor, t: Tensor, limit: float, limits: Limits) -> tuple[str, str]:
    """One rank's tensor beside the right one: a factor, some rows, or a direction."""
    square = norm_of(r) ** 2
    factor = (t * r).sum().item() / square if square else 0.0
    if not t.any():
        return "all zeros", "or none at all: is it unused, or left out?"
    if 0 < square <= limit**2:
        return "not zero", "in one process it is, but for rounding"
    if square and norm_of(t - factor * r) <= limit * max(abs(factor), 1.0):
        how = "too long" if factor > 1 else "as long"
        return f"{factor:.4g} times {how}", name_of_factor(factor, limits)
    if order := order_of(r, t, limit, limits):
        return "its parts in another order", order
    if r.dim() and len(r) > 1:
        far, size = ((x.reshape(len(r), -1)).norm(dim=1) for x in (t - r, r))
        counts = [i for i in range(len(r)) if size[i] > limit]  # of zeros nothing is known
        bad = [i for i in range(len(r)) if far[i] > limit]
        good = len(counts) - len(set(bad) & set(counts))
        if bad and 4 * good >= len(counts):
            return f"right in {len(r) - len(bad)} of {len(r)} rows", whose(
                bad, len(r), limits
            )
    off = 100 * norm_of(t - r) / (norm_of(r) or 1.0)
    says = f"{off:.{2 if off < 99.5 else 3}g}% off"
    for dtype in (torch.bfloat16, torch.float16):
        is_short = [torch.equal(x.to(dtype).to(x.dtype), x) for x in (t, r)]
        if off < 2 and is_short == [True, False]:
            return "another direction", f"{says}, all in numbers of {str(dtype)[6:]}"
    return "another direction", says


def order_of(r: Tensor, t: Tensor, limit: float, limits: Limits) -> str:
    """Where the right parts stand, if all are there and in another order."""
    for dim in range(min(r.dim(), 2)):
        for parts in range(2, limits.ranks + 1):
            if limits.ranks % parts or r.shape[dim] % parts:
                continue
            its, own = r.chunk(parts, dim), t.chunk(parts, dim)
            found = [[i for i, b in enumerate(its) if norm_of(a - b) <= limit] for a in own]
            order = [at[0] for at in found if len(at) == 1]
            if sorted(order) == list(range(parts)):
                return f"{parts} along {dim}, here {', '.join(map(str, order))}"
    return ""


def name_of_factor(factor: float, limits: Limits) -> str:
    """Which number of the plan a factor is."""
    size = abs(factor) if abs(factor) > 1 else 1 / (abs(factor) or math.inf)
    if size < 1.5 or abs(size - round(size)) > 1e-2:
        return ""
    named = [name for name, rows in limits.groups.items() if len(rows[0]) == round(size)]
    what = f"{round(size)} is the size of {' or of '.join(named)}" if named else ""
    if not named and round(size) == limits.ranks:
        what = f"{limits.ranks} is the number of ranks"
    if abs(factor) < 1:
        return f"divided once too often: {what}".removesuffix(": ")
    return what or f"are there {round(size)} micro-batches, or is a sum taken for a mean?"


def whose(bad: list[int], length: int, limits: Limits) -> str:
    """The rows that are wrong; and whose share they are, if they are one rank's."""
    is_run = bad[-1] - bad[0] + 1 == len(bad)
    dots = " …" if len(bad) > 4 else ""
    says = f"wrong are {bad[0]} to {bad[-1]}" if is_run else ""
    says = says or f"wrong are {', '.join(map(str, bad[:4]))}{dots}"
    for parts in range(limits.ranks, 1, -1):
        shares = torch.arange(length).chunk(parts)
        for number, share in enumerate(shares):
            if len(shares) == parts and share.tolist() == bad:
                return f"{says}, part {number} of {parts}"
    return says


def unnamed(ranks: int) -> Groups:
    """Groups that ranks may form without a name: all, neighbours, and those apart."""
    found = {f"the {ranks} ranks": [list(range(ranks))]}
    for size in (size for size in range(2, ranks) if ranks % size == 0):
        neighbours = torch.arange(ranks).view(-1, size)
        found[f"{size} neighbours"] = neighbours.tolist()
        found[f"{ranks // size} ranks that are {size} apart"] = neighbours.T.tolist()
    return found


def rows_returned(
    one: Notes, moved: Notes, ranks: Sequence[Notes], limits: Limits
) -> list[Row]:
    """What is returned: each rank's, their mean or sum, their parts in a row, or one's."""
    rows, every = [], [own for own in (notes.returned for notes in ranks) if own]
    for number, (right, other) in enumerate(zip(one.returned, moved.returned, strict=False)):
        own = [tensors[number].double() for tensors in every if len(tensors) > number]
        if not own or not right.is_floating_point():
            continue
        r, limit = right.double(), limits.of(right, other)
        norm, ways = norm_of(r) or 1.0, ways_of(own, r)
        off = {way: norm_of(t - r) for way, t in ways.items() if t.shape == r.shape}
        way = min(off, key=off.get, default="")
        far, name = off.get(way, math.inf), f"number {number + 1}"
        kind = more = ""
        if not far <= limit:
            kind, more = (
                "another value",
                "no rank's, nor the mean, the sum or the parts of all",
            )
            if not r.dim() and way:
                more = f"{way} is {ways[way].item():.6g}, expected {r.item():.6g}"
        rows.append(Row("values returned", name, far / norm, limit / norm, kind, more))
    return rows


def ways_of(own: list[Tensor], r: Tensor) -> dict[str, Tensor]:
    """How the values of several ranks can be the one value of one process."""
    ways = {}
    if all(t.shape == own[0].shape for t in own):
        ways["the mean of the ranks"] = sum(own) / len(own)
        ways["the sum of the ranks"] = sum(own)
        if all(norm_of(t - own[0]) <= 1e-3 * norm_of(own[0]) for t in own):
            ways["each rank's"] = max(
                own, key=lambda t: norm_of(t - r) if t.shape == r.shape else 0
            )
    for dim in range(r.dim()):
        rests = {t.shape[:dim] + t.shape[dim + 1 :] for t in own if t.dim() == r.dim()}
        if len(rests) == 1 and all(t.dim() == r.dim() for t in own):
            ways[f"the ranks' parts along {dim}"] = torch.cat(own, dim)
    said = [(rank, t) for rank, t in enumerate(own) if t.any()]
    if len(said) == 1:
        ways[f"rank {said[0][0]}'s"] = said[0][1]
    return ways


def in_forward(
    one: Notes, moved: Notes, ranks: Sequence[Notes], limits: Limits, first: Row
) -> list[str]:
    """A sentence on the first module, from the front, with a row that one process has not.

    The forwards of all steps up to the first wrong tensor's are looked at, in their order.
    """
    word = first.when.partition("step ")[2].partition(",")[0]
    until = int(word) if word.isdecimal() else 1
    right: set[str] = set()
    for step in range(min(until, *(len(notes.outputs) for notes in (one, moved)))):
        its, other = one.outputs[step], moved.outputs[step]
        outputs = [(notes.outputs[step : step + 1] or [{}])[0] for notes in ranks]
        outputs = [
            without_root(own, its) if "unwatched" in notes.facts else own
            for notes, own in zip(ranks, outputs, strict=True)
        ]
        bad, of_step = outputs_of_step(its, other, outputs, limits)
        if bad:
            where = "in forward" if step == 0 else f"in forward of step {step + 1}"
            return [f"{where} the first is the output of {bad}"]
        right |= of_step
    if not right:
        return []
    last = next((name for name in reversed(one.outputs[0]) if name), "")
    says = "forward is right" if until == 1 else f"forward is right up to step {until}"
    says = f"{says}, in {count(len(right), 'module')}"
    if not right & {"", last}:
        says += f", but the output of {last}, the last, was not compared"
    return [says]


def without_root(own: dict[str, Tensor], one: dict[str, Tensor]) -> dict[str, Tensor]:
    """A rank's outputs; of a stage, which lacks modules, not the one called the model."""
    is_stage = bool(one.keys() - own.keys())
    return {name: rows for name, rows in own.items() if name or not is_stage}


def outputs_of_step(
    one: dict[str, Tensor], moved: dict[str, Tensor], ranks: list[dict], limits: Limits
) -> tuple[str, set[str]]:
    """The first wrong module of a step and its rows, and the modules that are right."""
    right = set()
    for name, rows in one.items():
        largest = rows.double().norm(dim=1).max().item()
        limit, other = TIMES * limits.eps * largest, moved.get(name)
        if other is not None and other.shape == rows.shape:
            limit += TIMES * (other.double() - rows.double()).norm(dim=1).max().item()
        for rank, outputs in enumerate(ranks):
            own = outputs.get(name)
            if own is None or own.shape[1] != rows.shape[1] or len(rows) >= ALL_ROWS:
                continue  # not here, a part of the features, or too many to know them all
            how = "donot_use_mm_for_euclid_dist"
            far = torch.cdist(own.double(), rows.double(), compute_mode=how).amin(1)
            if bad := int((far > limit).sum()):
                what = f"{bad} of {len(own)} rows on rank {rank}"
                return f"{name or 'the model'}: {what}", right
            right.add(name)
    return "", right


def bound_of(off: float) -> str:
    """The next of a few round numbers: the digits below them differ between processors."""
    return f"{next(bound for bound in BOUNDS if off <= bound):.0e}".replace("e-0", "e-")


def norm_of(t: Tensor) -> float:
    """The norm in float64."""
    return t.double().norm().item()


def count(number: int, word: str) -> str:
    """A number of things in words."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def the_ranks(ranks: Sequence[int]) -> str:
    """Ranks in words, the first four of them."""
    each = sorted(set(ranks))
    dots = " …" if len(each) > 4 else ""
    return f"rank{'s' if len(each) > 1 else ''} {', '.join(map(str, each[:4]))}{dots}"


# A script, by torchrun


def run_script(given: argparse.Namespace, moved: bool) -> list[tuple]:
    """As one rank: run the script for its first steps. Rank 0 gets the notes of all ranks.

    They are sent when the job has ended, over a group of their own, so that ranks can be on
    several machines.
    """
    sys.argv = [given.script, *given.words]
    sys.path.insert(0, str(Path(given.script).resolve().parent))
    sys.path.append(str(Path(__file__).parent))  # for `from proof import watched`
    dist.destroy_process_group = lambda *group: None  # it is needed for a while
    with watching(dtype_of(given), moved, given.steps) as watch:
        try:
            runpy.run_path(given.script, run_name="__main__")
        except Enough:
            pass
        except SystemExit as end:
            if end.code:
                raise
    start, steps, *rest = watch.notes()  # plain tuples, which this file as a program can load
    notes = start, [tuple(step) for step in steps], *rest
    if ranks_of_launcher() == 1:
        return [notes]
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    every = [None] * size_of() if dist.get_rank() == 0 else None
    dist.gather_object(notes, every, group=dist.new_group(backend="gloo"))
    return every or []


def ranks_of_launcher() -> int:
    """How many ranks torchrun, or who else has started this process, has started; or 1."""
    return int(os.environ.get("WORLD_SIZE", 1))


def said_by_first(given: argparse.Namespace, every: list[tuple]) -> int:
    """Under a launcher rank 0 compares and says it; all ranks end with its exit code."""
    patience = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    code = [outcome_of(given, every) if every else None]
    dist.broadcast_object_list(code, src=0, group=patience)
    return code[0]


def dtype_of(given: argparse.Namespace) -> torch.dtype | None:
    """The dtype that the command line names; None for "own"."""
    return None if given.dtype == "own" else getattr(torch, given.dtype)


def prove_script(
    given: argparse.Namespace, every: list[tuple] | None = None
) -> tuple[Proof, int]:
    """Run a script three times by torchrun; the outcome, and how many steps were seen.

    Twice, if `every` rank's notes are there already. Raises ValueError where nothing is
    proved.
    """
    cores = (os.cpu_count() or 1) // given.ranks
    os.environ.setdefault("OMP_NUM_THREADS", str(max(cores, 1)))  # alike in all three
    with tempfile.TemporaryDirectory() as home:
        (one,) = run_ranks(given, 1, Path(home) / "one")
        if not one.steps[0].gradients:
            raise ValueError(f"{given.script} took no step of an optimizer of torch")
        (moved,) = run_ranks(given, 1, Path(home) / "moved")
        if every is None:
            ranks = run_ranks(given, given.ranks, Path(home) / "ranks")
        else:
            ranks = [notes_of(own) for own in every]
    return compare(one, moved, ranks), min(len(run.steps) for run in (one, moved, *ranks))


def run_ranks(given: argparse.Namespace, ranks: int, folder: Path) -> list[Notes]:
    """Run the script on so many ranks, and read what they have noted in a folder."""
    how = ", with every number a unit in the last place off" if folder.name == "moved" else ""
    print(f"{given.script} on {count(ranks, 'rank')}{how}:", file=sys.stderr, flush=True)
    folder.mkdir()
    run = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", __file__]
    run += [f"--steps={given.steps}", f"--dtype={given.dtype}", f"--into={folder}"]
    words = given.words if given.alone is None else shlex.split(given.alone)
    words = given.words if folder.name == "ranks" else words
    own = [str(given.ranks), given.script, *words]
    try:  # its agent runs in this process, which saves an interpreter
        torchrun.run(torchrun.parse_args(run + own))
    except ChildFailedError:
        alone = ": it has to run on one too, with meshes of size 1" if ranks == 1 else ""
        says = f"{given.script} failed on {count(ranks, 'rank')}, as said above{alone}"
        raise ValueError(says) from None
    return [notes_of(own) for own in torch.load(folder / "notes.pt", weights_only=True)]


def notes_of(own: tuple) -> Notes:
    """What a rank of a script has sent."""
    start, steps, *rest = own
    return Notes(start, [Step(*step) for step in steps], *rest)


def outcome_of(given: argparse.Namespace, every: list[tuple] | None = None) -> int:
    """Say whether the job is right: 0 if it is, 1 if not, 2 if nothing was proved."""
    try:
        proof, steps = prove_script(given, every)
    except ValueError as error:
        print(f"nothing is proved: {error}", file=sys.stderr)
        return 2
    print(proof, flush=True)
    if proof.right and steps < given.steps:
        says = f"{given.script} took {count(steps, 'step')}, and {given.steps} were asked for"
        print(f"not all is proved: {says}", file=sys.stderr)
        return 2
    return 0 if proof.right else 1


def main(words: Sequence[str]) -> int:
    """The command line: 0 if the job is right, 1 if it is not, 2 if nothing was proved."""
    parser = argparse.ArgumentParser(
        "prove",
        usage="%(prog)s [--steps N] [--dtype D] [--alone WORDS] ranks script …",
        description="Does a training script compute on several ranks what it computes on "
        "one? It is run three times, until its first steps: on one rank, on one rank with "
        "every number a unit in the last place off, and on as many as you ask for. Put "
        "behind torchrun, or srun, it takes their ranks, on any number of machines.",
        epilog="ends with 0 if all tensors are those of one process, with 1 if one is not, "
        "and with 2 if nothing was proved",
    )
    parser.add_argument("ranks", type=int, help="on which the script is proved")
    parser.add_argument("script", help="as torchrun starts it; its own words come after it")
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=2, help="of its optimizer (2)")
    parser.add_argument(
        "--dtype",
        default="own",
        choices=["float64", "float32", "own"],
        help="of its models; own: as the script has them (own)",
    )
    parser.add_argument(
        "--alone", metavar="WORDS", help="of the script on one rank, if they are others there"
    )
    parser.add_argument("--into", help=argparse.SUPPRESS)  # of a rank
    given = parser.parse_args(words)
    if given.into:
        folder = Path(given.into)
        if every := run_script(given, folder.name == "moved"):
            torch.save(every, folder / "notes.pt")
        return 0
    if not Path(given.script).is_file():
        parser.error(f"there is no script {given.script}")
    if "WORLD_SIZE" not in os.environ:
        return outcome_of(given)
    if given.ranks != ranks_of_launcher():
        parser.error(
            f"{given.ranks} ranks are to be proved, of {ranks_of_launcher()} started"
        )
    every = run_script(given, moved=False)
    return outcome_of(given, every) if given.ranks == 1 else said_by_first(given, every)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
