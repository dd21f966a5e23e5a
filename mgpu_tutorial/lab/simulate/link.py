"""A slower network than this machine has, by waiting: it takes time, but no processor.

On one machine the ranks' messages go through memory, and cost the same cores that compute.
Between machines or GPUs a transfer takes its time while the processors are free. Inside
`slow_link` an all_reduce, and each of its two halves, is real, and complete only when such a
link would have done it.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

# What an all_reduce consists of, and the share of its time that each takes.
SHARES = {"all_reduce": 1.0, "reduce_scatter_single": 0.5, "all_gather_single": 0.5}


@contextmanager
def slow_link(seconds: Callable[[int], float]) -> Iterator[None]:
    """Make each all_reduce of this rank take `seconds(nbytes)` more, one after the other.

    `nbytes` are those of its tensor. An all_gather_single or reduce_scatter_single is half of
    an all_reduce and takes half the time; its bytes are those of the larger side. Only calls
    from Python are slowed, so DDP needs a communication hook. Every rank must enter; what is
    on the way at the end is finished.
    """
    wire = threading.Lock()  # carries one message after the other
    on_the_way: list[SlowWork] = []

    def slowed(real: Callable, share: float) -> Callable:
        def slow(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> "SlowWork | None":
            is_asynchronous = kwargs.pop("async_op", False)
            sides = [t for t in (tensor, *args) if isinstance(t, torch.Tensor)]
            duration = share * seconds(max(t.nbytes for t in sides))
            work = SlowWork(
                wire, real(tensor, *args, **kwargs, async_op=True), tensor, duration
            )
            on_the_way.append(work)
            if is_asynchronous:
                return work
            work.wait()

        return slow

    calls = {name: getattr(dist, name) for name in SHARES}
    # PyTorch's own, or what the recorder's around it calls
    reals = {name: getattr(call, "original", call) for name, call in calls.items()}
    for name, share in SHARES.items():
        _put_inside(name, calls[name], reals[name], slowed(reals[name], share))
    try:
        yield
    finally:
        for name in SHARES:
            _put_inside(name, calls[name], reals[name], reals[name])
        for work in on_the_way:  # what waits for one may append the next
            work.carrier.join()


def _put_inside(name: str, outer: Callable, real: Callable, new: Callable) -> None:
    """Let `new` be called where `real` was: by the recorder, or by everybody."""
    if outer is real:
        setattr(dist, name, new)
    else:
        outer.original = new


class SlowWork:
    """A Work that is complete when the link has had its time for it."""

    def __init__(
        self, wire: threading.Lock, work: Any, tensor: torch.Tensor, seconds: float
    ) -> None:
        def carry() -> None:
            try:
                work.wait()
                with wire:
                    time.sleep(seconds)
                self._future.set_result([tensor])
            except Exception as error:  # a peer that died: whoever waits must learn it
                self._future.set_exception(error)

        self._future = torch.futures.Future()
        # One each: whoever waits for a call may make the next one there, and wait for that.
        self.carrier = threading.Thread(target=carry)
        self.carrier.start()

    def wait(self) -> bool:
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future:
        return self._future
