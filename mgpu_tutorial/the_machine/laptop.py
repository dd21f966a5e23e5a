"""Measures this machine: products and an addition, an all-reduce, and both on a new node."""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from mgpu_tutorial.lab.measure import in_turns
from mgpu_tutorial.lab.words import bytes_text


def products(rank: int, world_size: int, *sizes: int) -> dict[int | str, tuple]:
    """Of n × n products and of a long addition: operations per byte, and 10⁹ per second."""
    work, actions = {}, {}
    for n in sizes:
        a, b, out = torch.ones(3, n, n)
        work[n] = 2 * n**3, 3 * out.nbytes
        actions[n] = partial(torch.mm, a, b, out=out)
    a, b, out = torch.ones(3, 2**24)
    work["addition"] = len(out), 3 * out.nbytes
    actions["addition"] = partial(torch.add, a, b, out=out)
    seconds = in_turns(actions, turns=8, warm_up=1)
    return {
        name: (flops / nbytes, flops / min(seconds[name]) / 1e9)
        for name, (flops, nbytes) in work.items()
    }


def reduce_two(rank: int, world_size: int, method: Callable, small: int, large: int) -> list:
    """The least seconds of an all-reduce of two sizes in bytes, until all ranks have it."""

    def until_all_have(tensor: torch.Tensor) -> None:
        method(tensor)
        dist.barrier()

    def least(nbytes: int, turns: int) -> float:
        action = partial(until_all_have, torch.zeros(nbytes // 4))
        (seconds,) = in_turns({nbytes: action}, turns, warm_up=2).values()
        return min(seconds)

    return [least(small, turns=40), least(large, turns=6)]


def first_look(rank: int, world_size: int, width: int = 8192, most: int = 2**30) -> dict:
    """A product and a copy in 16 bits, and all-reduces of three sizes as bus bandwidth."""
    if world_size < 2:
        raise ValueError(f"an all-reduce is between two ranks or more, got {world_size}")
    a = torch.ones(width, width, dtype=torch.bfloat16)
    rates = {"product, TFLOP/s": 2 * width**3 / seconds_of(lambda: a @ a) / 1e12}
    copied = torch.empty(most // 2, dtype=torch.bfloat16)
    source = torch.ones_like(copied)
    rates["copy, GB/s"] = 2 * most / seconds_of(lambda: copied.copy_(source)) / 1e9
    for nbytes in (most // 2**10, most // 2**5, most):
        tensor = torch.ones(nbytes // 2, dtype=torch.bfloat16)
        seconds = seconds_of(lambda tensor=tensor: dist.all_reduce(tensor))
        sent = 2 * (world_size - 1) / world_size * nbytes
        rates[f"all-reduce of {bytes_text(nbytes)}, GB/s"] = sent / seconds / 1e9
    return rates


def seconds_of(action: Callable, times: int = 5) -> float:
    """Of one call, in the better of two rounds; the first call warms up."""
    rounds = []
    for count in (1, times, times):
        if torch.accelerator.is_available():  # a call returns before the work is done
            torch.accelerator.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            action()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        rounds.append((time.perf_counter() - begin) / count)
    return min(rounds[1:])
