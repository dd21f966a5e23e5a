"""A slower network than this machine has, by waiting: it takes time, but no processor.

On one machine the ranks' messages go through memory, and cost the same cores that compute.
Between machines or GPUs a transfer takes its time while the processors are free. Inside
`slow_link` an all_reduce is real, and complete only when such a link would have done it.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def slow_link(seconds: Callable[[int], float]) -> Iterator[None]:
    """Make each all_reduce of this rank take `seconds(nbytes)` more, one after the other.

    `nbytes` are those of its tensor. Only calls from Python are slowed, so DDP needs a
    communication hook. Every rank must enter; what is on the way at the end is finished.
    """
    outer = dist.all_reduce  # PyTorch's own, or the recorder's around it
    real = getattr(outer, "original", outer)
    with ThreadPoolExecutor(1, thread_name_prefix="link") as wire:

        def slow(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> "SlowWork | None":
            asynchronous = kwargs.pop("async_op", False)
            work = real(tensor, *args, **kwargs, async_op=True)
            slowed = SlowWork(wire, work, tensor, seconds(tensor.nbytes))
            if asynchronous:
                return slowed
            slowed.wait()
            return None

        _put_inside(outer, real, slow)
        try:
            yield
        finally:
            _put_inside(outer, real, real)


def _put_inside(outer: Callable, real: Callable, new: Callable) -> None:
    """Let `new` be called where `real` was: by the recorder, or by everybody."""
    if outer is real:
        dist.all_reduce = new
    else:
        outer.original = new


class SlowWork:
    """A Work that is complete when the link has had its time for it."""

    def __init__(
        self, wire: ThreadPoolExecutor, work: Any, tensor: torch.Tensor, seconds: float
    ) -> None:
        self._future = torch.futures.Future()
        wire.submit(self._carry, work, tensor, seconds)

    def _carry(self, work: Any, tensor: torch.Tensor, seconds: float) -> None:
        try:
            work.wait()
            time.sleep(seconds)
            self._future.set_result([tensor])
        except Exception as error:  # a peer that died: whoever waits must learn it
            self._future.set_exception(error)

    def wait(self) -> bool:
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future:
        return self._future
