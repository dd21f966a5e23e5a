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

    `nbytes` is the size of the tensor. Only calls from Python are slowed, so DDP needs a
    communication hook. Every rank must enter; what is on the way at the end is finished.
    """
    call = dist.all_reduce
    below = getattr(call, "original", call)  # under the recorder, where there is one
    with ThreadPoolExecutor(1, thread_name_prefix="link") as wire:

        def slow(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> "SlowWork | None":
            asynchronous = kwargs.pop("async_op", False)
            work = below(tensor, *args, **kwargs, async_op=True)
            slowed = SlowWork(wire, work, tensor, seconds(tensor.nbytes))
            return slowed if asynchronous else slowed.wait() and None

        if below is call:
            dist.all_reduce = slow
        else:
            call.original = slow
        try:
            yield
        finally:
            if below is call:
                dist.all_reduce = call
            else:
                call.original = below


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
