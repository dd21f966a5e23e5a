"""A launch as Chrome's trace format, which ui.perfetto.dev and chrome://tracing draw.

Each rank is a process of that picture: its calls and spans are slices, its notes instants,
the memory that it held a counter. What an asynchronous call leaves to be done is a track of
its own, and an arrow leads from each send to the recv that took it.
"""

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

from mgpu_tutorial.lab.record.trace import Event

MICRO = 1e6  # the format counts in microseconds


def trace_events(
    events: list[Event], names: list[str], memory: list[list[tuple[float, int]]]
) -> list[dict[str, Any]]:
    """The list `traceEvents`: one process for each of `names`, times from the launch on.

    `memory` holds for each rank pairs of a moment (s) and the resident bytes at it.
    """
    found: list[dict[str, Any]] = []
    for rank, name in enumerate(names):
        found.append(_process(rank, "process_name", name=name))
        found.append(_process(rank, "process_sort_index", sort_index=rank))
    for event in events:
        found += _slices(event)
    for rank, samples in enumerate(memory):
        for moment, size in samples:
            found.append(
                {
                    "ph": "C",
                    "name": "resident memory (MiB)",
                    "pid": rank,
                    "ts": moment * MICRO,
                    "args": {"MiB": round(size / 2**20, 1)},
                }
            )
    return found + list(_arrows(events))


def _process(rank: int, field: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": field, "pid": rank, "args": args}


def _slices(event: Event) -> Iterator[dict[str, Any]]:
    own = {"pid": event.rank, "tid": event.rank}
    name = event.note if event.kind in ("span", "note") else event.op
    details = {
        "peer": event.peer,
        "tag": event.tag or None,
        "group": list(event.group) or None,
        "bytes": event.nbytes or None,
        "line": event.line or None,
    }
    args = {key: value for key, value in details.items() if value is not None}
    head = {"name": name, "cat": event.kind, "ts": event.begin * MICRO, "args": args} | own
    if event.kind == "note":
        yield head | {"ph": "i", "s": "t"}
    elif event.end is None:  # a call that never came back: a slice that nobody closes
        yield head | {"ph": "B"}
    else:
        yield head | {"ph": "X", "dur": (event.end - event.begin) * MICRO}
    if event.done is not None:
        track = {"name": f"{name} in flight", "cat": event.kind, "id": _identity(event)} | own
        yield track | {"ph": "b", "ts": event.begin * MICRO}
        yield track | {"ph": "e", "ts": event.done * MICRO}


def _arrows(events: list[Event]) -> Iterator[dict[str, Any]]:
    """From each send to its recv: messages of one sender and tag arrive in their order."""
    sent: dict[tuple, deque[Event]] = defaultdict(deque)
    for event in events:
        if event.sends:
            sent[event.rank, event.peer, event.tag].append(event)
    for event in events:
        waiting = sent.get((event.peer, event.rank, event.tag))
        if event.kind != "p2p" or event.sends or not waiting:
            continue
        send = waiting.popleft()
        arrow = {"name": "message", "cat": "message", "id": _identity(send)}
        for end, phase in ((send, {"ph": "s"}), (event, {"ph": "f", "bp": "e"})):
            yield arrow | phase | {"pid": end.rank, "tid": end.rank, "ts": end.begin * MICRO}


def _identity(event: Event) -> str:
    return f"{event.rank}.{event.index}"
