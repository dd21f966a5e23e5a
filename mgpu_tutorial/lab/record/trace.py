"""Record what the ranks say to each other: one recorder, several drawings.

Inside a rank the functions of torch.distributed are wrapped. Each call becomes a line in the
rank's file when it begins and one when it ends, so that the record of a rank that hangs or
dies is complete up to the call it died in.
"""

import functools
import inspect
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mgpu_tutorial.lab import borrowed
from mgpu_tutorial.lab.record import source_lines
from mgpu_tutorial.lab.record.source_lines import SourceLine

POINT_TO_POINT = ("send", "recv", "isend", "irecv")
COLLECTIVES = (
    *("broadcast", "all_reduce", "reduce", "gather", "scatter", "all_gather"),
    *("reduce_scatter", "all_to_all", "barrier", "monitored_barrier", "all_to_all_single"),
    *("all_gather_single", "all_gather_into_tensor"),
    *("reduce_scatter_single", "reduce_scatter_tensor"),
    *("gather_single", "gather_into_tensor"),  # since PyTorch 2.14
    # of compiled and of tensor-parallel code only
    *("all_gather_tensor", "all_gather_tensor_autograd", "all_gather_single_autograd"),
    *("reduce_scatter_tensor_autograd", "reduce_scatter_single_autograd"),
    "all_to_all_single_autograd",
)


@dataclass
class Event:
    """One operation, span or note of one rank.

    `begin` and `end` are seconds since the launch (`end` is None for a call that never came
    back); an asynchronous collective comes back at once and is complete at `done` (not known
    with NCCL). `nbytes` is the payload of this call, not what a collective then moves.
    """

    rank: int
    index: int
    op: str
    begin: float
    end: float | None = None
    done: float | None = None
    peer: int | None = None
    tag: int = 0
    group: tuple[int, ...] = ()
    nbytes: int = 0
    note: str = ""
    of: int | None = None
    at: tuple = ()  # of an isend or irecv: the source line that made it
    dropped: float | None = None  # when its work object was lost that nobody waited for

    @property
    def kind(self) -> str:
        """One of "p2p", "collective", "wait", "span", "note" and "frame"."""
        if self.op in POINT_TO_POINT:
            return "p2p"
        return self.op if self.op in ("wait", "span", "note", "frame") else "collective"

    @property
    def sends(self) -> bool:
        """True for the two calls that put bytes on the wire for one peer."""
        return self.op in ("send", "isend")


class Recorder:
    """Writes this rank's events to a file, a line when each begins and when it ends.

    Several threads of a rank may call at once: each is inside a call of its own.
    """

    def __init__(self, path: Path) -> None:
        self._file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115
        self._indices = itertools.count()
        self._thread = threading.local()

    def begin(self, op: str, **details: Any) -> int:
        index = next(self._indices)
        self.write(index=index, op=op, begin=time.monotonic(), **details)
        return index

    def end(self, index: int, **details: Any) -> None:
        self.write(index=index, end=time.monotonic(), **details)

    def write(self, **fields: Any) -> None:
        self._file.write(json.dumps(fields, default=int) + "\n")  # numbers of NumPy

    def install(self) -> None:
        """Wrap the operations of torch.distributed in this process, for good."""
        for name in (*POINT_TO_POINT, *COLLECTIVES):
            if original := getattr(c10d, name, None):
                setattr(c10d, name, self.wrapped(name, original))  # P2POp compares with it
                setattr(dist, name, getattr(c10d, name))
        functional = borrowed.functional_collectives.thing
        for name in COLLECTIVES:
            if original := getattr(functional, name, None):
                setattr(functional, name, self.wrapped(name, original))

    def wrapped(self, op: str, original: Callable) -> Callable:
        """The same call, which is recorded."""
        signature = inspect.signature(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if getattr(self._thread, "is_inside", False):
                return original(*args, **kwargs)  # recv calls irecv: it was one call
            self._thread.is_inside = True
            try:
                given = signature.bind_partial(*args, **kwargs).arguments
                index = self.begin(op, **_describe(given), **_place(op))
                result = original(*args, **kwargs)
                self.end(index, **({"peer": result} if op == "recv" else {}))
            finally:
                self._thread.is_inside = False
            is_async = given.get("async_op")
            if result is None or not (is_async or op in ("isend", "irecv")):
                return result
            # NCCL's future only knows "queued"
            known = is_async and "nccl" not in dist.get_backend(given.get("group"))
            return TracedWork(result, self, index, known, is_p2p=not is_async)

        call.recorder = self
        call.original = original  # what slow_link puts itself around
        return call


class TracedWork:
    """A torch.distributed Work whose `wait` is recorded; all else passes through."""

    def __init__(
        self, work: Any, recorder: Recorder, index: int, known: bool, is_p2p: bool = False
    ) -> None:
        self._is_open = is_p2p  # nobody has waited for it yet
        self._work, self._recorder, self._index = work, recorder, index
        self._has_no_future = False
        try:
            if known:
                work.get_future().add_done_callback(lambda _: self._done())
        except RuntimeError:  # of gloo's reduce_scatter: it is done when it was waited for
            self._has_no_future = True

    def _done(self) -> None:
        self._recorder.write(index=self._index, done=time.monotonic())

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        self._is_open = False
        index = self._recorder.begin("wait", of=self._index)
        result = self._work.wait(*args, **kwargs)
        self._recorder.end(index)
        if self._has_no_future:
            self._done()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def __del__(self) -> None:
        if self._is_open:
            with suppress(Exception):  # at the end of the process
                self._recorder.write(index=self._index, dropped=time.monotonic())


def _describe(given: dict[str, Any]) -> dict[str, Any]:
    members = _members(given.get("group"))
    peer = given.get("dst", given.get("src"))
    inner = given.get("group_dst", given.get("group_src"))
    if peer is None and inner is not None and members:
        peer = members[inner]
    nbytes = next(filter(None, map(_nbytes, given.values())), 0)  # of the first that has any
    return {"peer": peer, "tag": given.get("tag", 0), "group": members, "nbytes": nbytes}


def _place(op: str) -> dict[str, SourceLine]:
    """Where a transfer was started whose `wait` may be forgotten."""
    if op not in ("isend", "irecv"):
        return {}
    place = source_lines.of_frame(sys._getframe())
    return {"at": place} if place else {}


def _members(group: Any) -> list[int]:
    """The ranks of a group, in any form that a collective takes."""
    if group is None:
        return list(range(dist.get_world_size())) if dist.is_initialized() else []
    if isinstance(group, dist.DeviceMesh):
        return group.mesh.flatten().tolist()
    if isinstance(group, list):
        return group
    if isinstance(group, tuple):  # a mesh and the number of its dimension
        group = group[0].get_group(group[1])
    if isinstance(group, str):
        group = borrowed.process_group_of(group)
    is_outside = group is dist.GroupMember.NON_GROUP_MEMBER
    return [] if is_outside else dist.get_process_group_ranks(group)


def _nbytes(value: Any) -> int:
    return sum(t.nbytes for t in borrowed.leaves_of(value) if isinstance(t, torch.Tensor))


def current() -> Recorder | None:
    """The recorder of this rank; None where nobody records."""
    return getattr(dist.barrier, "recorder", None)


@contextmanager
def span(name: str) -> Iterator[None]:
    """Mark a phase of a worker, such as `with span("backward"):`, for the timeline."""
    recorder = current()
    index = recorder.begin("span", note=name) if recorder else None
    try:
        yield
    finally:
        if recorder:
            recorder.end(index)


def note(text: object) -> None:
    """Write a remark beside this rank's lifeline, such as the value it holds now."""
    if recorder := current():
        recorder.end(recorder.begin("note", note=str(text)))


def read(path: Path, rank: int, origin: float) -> list[Event]:
    """The events that one rank wrote, in the order in which they began."""
    events: dict[int, dict] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(json.JSONDecodeError):  # the rank was killed in the middle of a line
            fields = json.loads(line)
            events.setdefault(fields["index"], {}).update(fields)
    for fields in events.values():
        fields["group"] = tuple(fields.get("group", ()))
        fields["at"] = tuple(fields.get("at", ()))
        for moment in {"begin", "end", "done", "dropped"} & fields.keys():
            fields[moment] -= origin
    whole = (events[i] for i in sorted(events) if "op" in events[i])  # whose first line is
    return [Event(rank=rank, **fields) for fields in whole]
