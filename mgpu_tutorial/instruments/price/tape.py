"""The tape of one rank: what it computes, sends, waits for and holds, in program order.

A worker runs on tensors that have shapes and no numbers, in PyTorch's "fake" process group,
which takes the process for one rank of as many as we like and moves nothing. So a model of
full size is taped without its memory and in little time. Nothing here is undone afterwards:
it belongs into a process that is thrown away. `pretended.py` prepares that process.
"""

import functools
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import optimizer
from torch.utils.weak import WeakIdKeyDictionary

from mgpu_tutorial.instruments.price import products
from mgpu_tutorial.lab import borrowed
from mgpu_tutorial.lab.record.trace import COLLECTIVES, POINT_TO_POINT, Recorder, TracedWork

# The strongest first: a bucket is a buffer until it is seen to be a gradient.
KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations")
LOOK_UPS = ("embedding", "index", "index_select", "gather")  # read no more than they write
ELSEWHERE = "no device of a priced rank"  # which is on the CPU, whatever its machine
HALF, TENSOR_FLOAT, EXACT = "16 bits", "TF32", "32 bits"  # the numbers of a product


class Operation(NamedTuple):
    """A kernel: the `flops` of its products, of such `numbers`, and `nbytes`.

    The bytes are those that it reads and writes in the GPU's memory. A sleep has `seconds`.
    """

    name: str
    flops: float = 0
    nbytes: float = 0
    numbers: str = HALF
    seconds: float = 0
    stream: int = 0


class Call(NamedTuple):
    """A collective of `group` on `nbytes` in all, or a message to or from `peer`."""

    name: str
    nbytes: float
    group: tuple[int, ...]
    peer: int | None = None
    tag: int = 0
    stream: int = 0


class Mark(NamedTuple):
    """A moment of a stream, for another stream; with a `name` the edge of a span."""

    stream: int = 0
    name: str = ""
    begins: bool = False


class Wait(NamedTuple):
    """A stream stands still until the call, or the mark, at position `of` is over."""

    of: int
    stream: int = 0


class Change(NamedTuple):
    """So many more bytes of one kind, from the event at `position` on."""

    position: int
    nbytes: int
    kind: str


Event = Operation | Call | Mark | Wait


class Tape(NamedTuple):
    """What one rank did: its events in order, and how its memory changed on the way."""

    events: list[Event]
    changes: list[Change]

    def step(self) -> "Tape":
        """The last span whose name begins with "step"; everything where there is none."""
        edges = [
            (position, event)
            for position, event in enumerate(self.events)
            if isinstance(event, Mark) and event.name.startswith("step")
        ]
        if not edges:
            return self
        first, opened = [edge for edge in edges if edge[1].begins][-1]
        last = next((p for p, e in edges if p > first and e.name == opened.name), None)
        events = [
            # what was called before the step is over: -1
            Wait(max(-1, event.of - first - 1), event.stream)
            if isinstance(event, Wait)
            else event
            for event in self.events[first + 1 : last]
        ]
        before: Counter = Counter()  # what is there when the step begins
        changes = []
        for change in self.changes:
            if change.position <= first:
                before[change.kind] += change.nbytes
            elif last is None or change.position <= last:
                changes.append(change._replace(position=change.position - first - 1))
        return Tape(events, [*(Change(0, n, kind) for kind, n in before.items()), *changes])


class Held:
    """A piece of memory; what it is for is known late, as of a gradient."""

    def __init__(self, is_empty: bool) -> None:
        self.is_empty, self.kind, self.nbytes = is_empty, KINDS[-1], 0

    def name(self, kind: str) -> None:
        self.kind = min(self.kind, kind, key=KINDS.index)


class Taping(Recorder):
    """The recorder of this process, to which `span` and `note` speak too; writes a tape."""

    def __init__(self) -> None:
        super().__init__(Path(os.devnull))
        self.events: list[Event] = []
        self.sizes: list[tuple[int, int, Held]] = []  # position, so many bytes more, of what
        self.held: WeakIdKeyDictionary = WeakIdKeyDictionary()  # by storage
        self.parameters: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self.stream, self.is_stepping, self.is_share = 0, False, False

    def tape(self) -> Tape:
        self.name_gradients(self.parameters)
        return Tape(self.events, [Change(p, more, held.kind) for p, more, held in self.sizes])

    def add(self, event: Event) -> int:
        self.events.append(event)
        return len(self.events) - 1

    # Calls and waits, as the recorder of `launch(trace=True)` sees them

    def begin(self, op: str, **details: Any) -> int:
        if op == "wait":
            return self.add(Wait(details["of"], self.stream))
        if op == "span":
            return self.add(Mark(self.stream, details["note"], begins=True))
        if op not in (*POINT_TO_POINT, *COLLECTIVES):
            return -1  # a note
        group, nbytes = tuple(details["group"]), details["nbytes"]
        nbytes *= len(group) if self.is_share else 1
        return self.add(Call(op, nbytes, group, details["peer"], details["tag"], self.stream))

    def end(self, index: int, **details: Any) -> None:
        opened = self.events[index] if index >= 0 else None
        if isinstance(opened, Mark):
            self.add(Mark(self.stream, opened.name))

    def write(self, **fields: Any) -> None:
        """Nothing: nobody looks at a clock here."""

    def wrapped(self, op: str, original: Callable) -> Callable:
        """The recorded call, and a wait behind it unless it is asynchronous."""
        original = getattr(original, "original", original)  # for the second rank
        recorded = super().wrapped(op, original)
        # the first tensor of these is one rank's share of what is gathered or scattered
        is_functional = "functional" in original.__module__  # takes the input first
        of_shares = op.startswith("all_gather_" if is_functional else "reduce_scatter")

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            number = len(self.events)
            self.is_share = of_shares
            result = recorded(*args, **kwargs)
            self.is_share = False
            if len(self.events) == number or not isinstance(self.events[number], Call):
                return result  # it was made inside another call, which was recorded
            for held in map(self.hold, tensors_of((args, kwargs))):
                if held.is_empty:
                    held.name("buffers")
            if not isinstance(result, TracedWork):
                self.add(Wait(number, self.stream))
            return result

        call.recorder, call.original = self, original
        return call

    # Kernels

    def operation(self, func: Any, given: list[Tensor], out: Any, flops: float) -> None:
        """Note a kernel that ran on these tensors, and the memory that is new with it."""
        name, made = func.overloadpacket.__name__, tensors_of(out)
        if other := {tensor.device.type for tensor in made} - {"cpu", "meta"}:
            raise ValueError(f"{min(other)} is {ELSEWHERE}")
        known = {id(t.untyped_storage()) for t in given}
        is_view = all(id(t.untyped_storage()) in known for t in made)
        is_empty = "empty" in name
        is_mutable = borrowed.schema_of(func).is_mutable
        if name == "all_gather_copy_in":  # of FSDP: its shards, one behind the other
            nbytes = 2 * sum(map(bytes_of, given[:-1]))
        elif is_empty or (is_view and not is_mutable):
            nbytes = 0
        elif name in LOOK_UPS:
            nbytes = 2 * sum(map(bytes_of, made))
        else:
            nbytes = sum(map(bytes_of, [*given, *made]))
        for tensor in given:
            if isinstance(tensor, nn.Parameter):
                self.see_parameter(tensor)
        for tensor in made:
            self.hold(tensor, is_empty)
        if nbytes or flops:
            numbers = numbers_of(given[0]) if flops else HALF
            self.add(Operation(name, flops, nbytes, numbers, 0, self.stream))

    def sleep(self, seconds: float) -> None:
        self.add(Operation("sleep", seconds=seconds, stream=self.stream))

    # Memory

    def hold(self, tensor: Tensor, is_empty: bool = False) -> Held:
        """The memory of a tensor and of its views, counted from now on until it is freed."""
        storage = local(tensor).untyped_storage()
        if storage not in self.held:
            held = self.held[storage] = Held(is_empty)
            self.resize(held, storage.nbytes())
            weakref.finalize(storage, self.resize, held, 0)
            if self.is_stepping:
                held.name("optimizer")
        return self.held[storage]

    def resize(self, held: Held, nbytes: int) -> None:
        if nbytes != held.nbytes:
            self.sizes.append((len(self.events), nbytes - held.nbytes, held))
            held.nbytes = nbytes

    def see_parameter(self, parameter: nn.Parameter) -> None:
        if parameter not in self.parameters:
            self.parameters[parameter] = True
            self.hold(parameter).name("parameters")
            if parameter.is_leaf and parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda p: self.name_gradients([p])
                )

    def name_gradients(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                self.hold(parameter.grad).name("gradients")

    def begin_step(self, which: optimizer.Optimizer, *_: Any) -> None:
        parameters = [p for group in which.param_groups for p in group["params"]]
        for parameter in parameters:
            self.see_parameter(parameter)
        self.name_gradients(parameters)
        self.is_stepping = True

    def end_step(self, *_: Any) -> None:
        self.is_stepping = False


class Kernels(borrowed.dispatch_mode.thing):
    """Sees every kernel of this thread, forward, backward and the optimizer's."""

    def __init__(self, taping: Taping) -> None:
        super().__init__()
        self.taping = taping

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks where a tensor is: most calls, and no kernel
            return func(*args, **kwargs)
        given = tensors_of((args, kwargs))
        if any(hasattr(tensor, "__tensor_flatten__") for tensor in given):
            for tensor in given:
                if isinstance(tensor, nn.Parameter):
                    self.taping.see_parameter(tensor)
            return NotImplemented  # a DTensor calls what its local tensors need
        out = func(*args, **kwargs)
        if func.namespace in ("aten", "fsdp"):
            flops = products.flops_of(func, args, kwargs, out)
            self.taping.operation(func, given, out, flops)
        elif not products.is_free(func.namespace):
            raise products.uncounted(f"{func.namespace}::{func.overloadpacket.__name__}")
        return out


def tensors_of(things: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in borrowed.leaves_of(things) if isinstance(leaf, Tensor)]


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a DTensor, or of a tensor that is still on its way."""
    for name in borrowed.LOCAL:
        tensor = getattr(tensor, name, tensor)
    return tensor


def bytes_of(tensor: Tensor) -> int:
    """No more than there are: an expanded tensor has the same number in many places."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def numbers_of(tensor: Tensor) -> str:
    """Of which numbers a product of this tensor is; those of 8 bits count as 16."""
    if tensor.dtype.itemsize <= 2:
        return HALF
    is_exact = torch.get_float32_matmul_precision() == "highest"
    return EXACT if is_exact or tensor.dtype == torch.float64 else TENSOR_FLOAT
