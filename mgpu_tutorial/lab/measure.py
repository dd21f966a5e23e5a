"""Seconds of several actions in turns, and the distance between tensors."""

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist


def in_turns(actions: Mapping, turns: int, warm_up: int = 0) -> dict[Any, list[float]]:
    """The seconds of each action in each of `turns`, after `warm_up` turns that do not count.

    So a disturbance of the machine hits all of them; it can only add to a time, and the least
    of a list is the nearest. In a process group every rank calls this, and all begin each
    action together; one that ends with a barrier is timed until the last rank has done it.
    """
    seconds: dict[Any, list[float]] = {name: [] for name in actions}
    for _ in range(warm_up + turns):
        for name, action in actions.items():
            if dist.is_initialized():
                dist.barrier()
            begin = time.perf_counter()
            action()
            seconds[name].append(time.perf_counter() - begin)
    return {name: taken[warm_up:] for name, taken in seconds.items()}


def largest_difference(found: Any, expected: Any) -> float:
    """The largest absolute difference of any two numbers in the same place.

    Both are tensors of one shape, or lists or dicts of these, nested alike. Infinite where
    a number is not finite. Raises ValueError where names, lengths or shapes differ.
    """
    pairs = _pairs(found, expected)
    differences = [(a.double() - b.double()).abs().max().item() for a, b in pairs if len(a)]
    return max((d if math.isfinite(d) else math.inf for d in differences), default=0.0)


def _pairs(found: Any, expected: Any) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
    if isinstance(expected, Mapping):
        if found.keys() != expected.keys():
            raise ValueError(f"{sorted(found)} is compared with {sorted(expected)}")
        found, expected = [found[name] for name in expected], list(expected.values())
    if isinstance(expected, list | tuple):
        for one, other in zip(found, expected, strict=True):
            yield from _pairs(one, other)
        return
    found, expected = torch.as_tensor(found).detach(), torch.as_tensor(expected).detach()
    if found.shape != expected.shape:
        raise ValueError(f"shape {list(found.shape)} is compared with {list(expected.shape)}")
    yield found.flatten(), expected.flatten()
