"""The few questions that a function asks of what it was given, each in one line.

A refusal stays where one sentence says who will meet it. For the rest there is `prove`, or
PyTorch says it.
"""

import hashlib
from collections.abc import Collection
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def whole(what: str, value: Any, least: int = 1) -> None:
    """Raise a ValueError unless the value is a whole number, and not below the least."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not value >= least or value % 1:
        raise ValueError(f"{what} must be a whole number, {least} or more, got {value!r}")


def positive(what: str, value: Any) -> None:
    """Raise a ValueError unless the value is a finite number above 0."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not 0 < value < float("inf"):
        raise ValueError(f"{what} must be a number above 0, got {value!r}")


def one_of(what: str, value: Any, known: Collection) -> None:
    """Raise a ValueError that lists what is known, unless the value is one of these."""
    if value not in known:
        raise ValueError(f"{what} must be one of {', '.join(map(str, known))}, got {value!r}")


def divides(what: str, number: int, parts: int) -> None:
    """Raise a ValueError unless a number has so many equal parts."""
    if number % parts:
        raise ValueError(f"{number} {what} have no {parts} equal parts: give a multiple")


def agree(group: dist.ProcessGroup | None = None, **things: Any) -> None:
    """Raise a ValueError on every rank of the group unless all have the same of each thing.

    A thing is a number, a text, a list of them, a tensor, or a module, of which all names,
    shapes and numbers count. One all-gather; each thing travels as its digits.
    """
    here = {name: _digits(thing) for name, thing in things.items()}
    everywhere: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everywhere, here, group=group)
    for rank, there in enumerate(everywhere):
        for name, found in there.items():
            if found != everywhere[0][name]:
                raise ValueError(
                    f"{name} must be the same on all ranks: rank {rank} of the group has "
                    f"{found}, and rank 0 {everywhere[0][name]}"
                )


def _digits(thing: Any) -> str:
    """What is compared of a thing, short enough for a sentence."""
    if isinstance(thing, nn.Module):
        thing = {**dict(thing.named_parameters()), **dict(thing.named_buffers())}
    if isinstance(thing, dict):
        return _short("; ".join(f"{name} {_digits(each)}" for name, each in thing.items()))
    if isinstance(thing, torch.Tensor):
        numbers = thing.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        of = hashlib.sha256(numbers.tobytes()).hexdigest()[:8]
        return f"{str(thing.dtype).removeprefix('torch.')}{list(thing.shape)} {of}"
    return _short(repr(thing))


def _short(text: str) -> str:
    if len(text) <= 80:
        return text
    return f"{text[:60]}… {hashlib.sha256(text.encode()).hexdigest()[:8]}"
