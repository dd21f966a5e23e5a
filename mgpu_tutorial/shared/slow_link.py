"""A slower network than this machine has, by waiting: it takes time, but no processor.

On one machine the ranks' messages go through memory, and cost the same cores that compute.
Between machines or GPUs a transfer takes its time while the processors are free. So inside
`slow_link` a message is real, and complete only when such a link would have carried it.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from mgpu_tutorial.lab.record.trace import current

# What an all_reduce consists of, and the share of its time that each takes.
SHARES = {"all_reduce": 1.0, "reduce_scatter_single": 0.5, "all_gather_single": 0.5}


class SlowWork(torch.futures.Future):
    """A Work, and its future, that is complete when the link has had its time for it."""

    def get_future(self) -> torch.futures.Future:
        return self


@contextmanager
def slow_link(seconds: Callable[[int], float]) -> Iterator[None]:
    """Make each all_reduce of this rank take `seconds(nbytes)` more, one after the other.

    `nbytes` are those of its tensor, of an all_gather_single or reduce_scatter_single, which
    takes half the time, those of the larger side. Only calls from Python are slowed, so DDP
    needs a communication hook. Every rank must enter; what is on the way is finished.
    """
    last, queue = threading.Event(), threading.Lock()  # messages are carried in their order
    last.set()
    # One each: whoever waits for a call may make the next one there, and wait for that.
    carriers: list[threading.Thread] = []

    def slowed(call: Callable, share: float) -> Callable:
        @functools.wraps(call)
        def slow(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> SlowWork | None:
            nonlocal last
            is_asynchronous, work = kwargs.pop("async_op", False), SlowWork()
            sizes = [t.nbytes for t in (tensor, *args) if isinstance(t, torch.Tensor)]
            duration = share * seconds(max(sizes))
            with queue:
                real = call(tensor, *args, **kwargs, async_op=True)
                before, over = last, threading.Event()
                last = over

            def carry() -> None:
                try:
                    real.wait()
                    before.wait()
                    time.sleep(duration)
                    over.set()
                    work.set_result([tensor])
                except Exception as error:  # a peer that died: whoever waits must learn it
                    over.set()
                    work.set_exception(error)

            carrier = threading.Thread(target=carry)
            carrier.start()
            carriers.append(carrier)  # several threads may come here at once
            if is_asynchronous:
                return work
            work.wait()

        return slow

    calls = {name: getattr(dist, name) for name in SHARES}
    recorder = current()
    for name, call in calls.items():
        slow = slowed(getattr(call, "original", call), SHARES[name])
        setattr(dist, name, recorder.wrapped(name, slow) if recorder else slow)
    try:
        yield
    finally:
        for name, call in calls.items():
            setattr(dist, name, call)
        for carrier in carriers:  # what waits for one may append the next
            carrier.join()
