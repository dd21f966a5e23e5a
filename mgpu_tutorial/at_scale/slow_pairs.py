"""Apparatus, not the lesson: messages that take their time, by who sends to whom."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def slow_pairs(seconds: Callable[[int, int, int], float]) -> Iterator[None]:
    """Make each `recv` of this rank take `seconds(source, rank, nbytes)` more.

    So a message from another node can be slow and one from the same node fast. Waiting
    takes no processor, and different pairs wait at the same time, as over cards of their
    own.
    """
    real = dist.recv

    def slow(tensor: torch.Tensor, src: int, **kwargs: object) -> int:
        sender = real(tensor, src, **kwargs)
        time.sleep(seconds(sender, dist.get_rank(), tensor.nbytes))
        return sender

    dist.recv = slow
    try:
        yield
    finally:
        dist.recv = real
