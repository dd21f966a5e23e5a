"""A process that pretends: streams of a GPU, a sleep without time, many ranks, no numbers.

What is replaced here stays so until the process ends.
"""

import functools
import inspect
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import optimizer

from mgpu_tutorial.instruments.price import ddp
from mgpu_tutorial.instruments.price.tape import Kernels, Mark, Tape, Taping, Wait
from mgpu_tutorial.lab import borrowed


class Stream:
    """Of a GPU: what is given to a stream runs in order, and beside what other streams do."""

    taping: Taping
    count = 0  # of the streams beside the usual one, which is number 0

    def __init__(self, priority: int = 0) -> None:
        Stream.count += 1
        self.number = Stream.count

    def record_event(self, event: Any = None) -> "StreamEvent":
        event = event or StreamEvent()
        event.record(self)
        return event

    def wait_event(self, event: "StreamEvent") -> None:
        if event.position is not None:
            self.taping.add(Wait(event.position, self.number))

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())


class StreamEvent:
    """A moment of a stream, for which another stream, or the program, may wait."""

    position: int | None = None

    def record(self, stream: Stream | None = None) -> "StreamEvent":
        taping = Stream.taping
        self.position = taping.add(Mark(stream.number if stream else taping.stream))
        return self

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        self.wait()

    def query(self) -> bool:
        return True


def current_stream(device: Any = None) -> Stream:
    """The stream to which this moment's kernels go."""
    stream = Stream.__new__(Stream)
    stream.number = Stream.taping.stream
    return stream


@contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """What is called inside goes to this stream."""
    before = Stream.taping.stream
    Stream.taping.stream = stream.number if stream else before
    try:
        yield
    finally:
        Stream.taping.stream = before


def tape_worker(rank: int, worker: Callable, ranks: int, args: tuple, kwargs: dict) -> Tape:
    """Run `worker(rank, ranks, …)` as one pretended rank of this process, and tape it."""
    taping, Stream.count = Taping(), 0
    Stream.taping = taping
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=borrowed.fake_store())
    taping.install()
    handles = [
        optimizer.register_optimizer_step_pre_hook(taping.begin_step),
        optimizer.register_optimizer_step_post_hook(taping.end_step),
    ]
    with borrowed.fake_tensors(allow_non_fake_inputs=True), Kernels(taping):
        worker(rank, ranks, *args, **kwargs)
    for handle in handles:
        handle.remove()
    tape = taping.tape()
    dist.destroy_process_group()
    return tape


def pretend() -> None:
    """Give this process streams, a sleep that takes no time, and DDP without its C++.

    What fills parameters with first numbers does nothing: there are none, and some of it asks
    for them, as `trunc_normal_` does, which draws until all are inside.
    """
    ddp.pretend()
    for name, function in vars(nn.init).items():
        if name.endswith("_") and inspect.isfunction(function) and not function.__closure__:
            # its code, because many modules have imported the function itself
            function.__code__ = nothing.__code__
            function.__defaults__ = function.__kwdefaults__ = None
    torch.cpu.Stream, torch.cpu.Event = Stream, StreamEvent
    torch.cpu.current_stream, torch.cpu.stream = current_stream, on_stream
    sleep, resize = time.sleep, torch.UntypedStorage.resize_
    swap = torch.utils.swap_tensors

    def pretended(seconds: float) -> None:
        is_worker = threading.current_thread() is threading.main_thread()
        (Stream.taping.sleep if is_worker else sleep)(seconds)

    def resized(storage: torch.UntypedStorage, nbytes: int) -> Any:
        if held := Stream.taping.held.get(storage):
            Stream.taping.resize(held, nbytes)
        return resize(storage, nbytes)

    def swapped(tensor: torch.Tensor, converted: torch.Tensor) -> None:
        """Of `Module.to`, which gives `converted` to nobody else."""
        try:
            swap(tensor, converted)
        except RuntimeError:  # tensors without numbers are remembered, so they cannot swap
            tensor.data = converted.data

    time.sleep, torch.UntypedStorage.resize_ = pretended, resized
    torch.utils.swap_tensors = swapped
    for name, method in list(vars(dist.DeviceMesh).items()):
        if inspect.isfunction(method):
            setattr(dist.DeviceMesh, name, with_numbers(method))


def nothing(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """In place of what fills a tensor: a priced one has no numbers."""
    return tensor


def with_numbers(method: Callable) -> Callable:
    """A method of a mesh, which knows the numbers of its ranks."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with borrowed.without_modes():
            if (ranks := kwargs.get(borrowed.RANK_MAP)) is not None:
                kwargs[borrowed.RANK_MAP] = torch.arange(len(ranks), dtype=torch.int)
            return method(*args, **kwargs)

    return call
