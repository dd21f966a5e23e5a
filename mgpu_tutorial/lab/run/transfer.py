"""Carry a worker, its arguments and its results between kernel and ranks, as files.

A rank that dies half-way leaves no pipe that somebody still waits on. Functions of a notebook
cell go by value (cloudpickle), package functions by reference, so that a rank always runs the
text that is on disk now.
"""

import inspect
import io
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import FunctionType, MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import cloudpickle
import torch

from mgpu_tutorial.lab.run import errors
from mgpu_tutorial.lab.run.files import require_private


class CannotTravel(TypeError):
    """An argument or a result that no pickle can hold; the message names it."""


def _reduce_cached(function: Any) -> str | tuple:
    """A cached function of a cell by value, with nothing in its cache; others by name."""
    if function.__module__ in sys.modules.keys() - {"__main__"}:
        return function.__reduce__()
    return _cached, (function.__wrapped__, *function.cache_parameters().values())


def _cached(function: Callable, maxsize: int | None, typed: bool) -> Callable:
    return lru_cache(maxsize, typed)(function)


class Pickler(cloudpickle.Pickler):
    """Holds also what `lru_cache` and `singledispatch` make of a function of a cell."""

    dispatch_table = cloudpickle.Pickler.dispatch_table.new_child(
        {
            type(lru_cache(len)): _reduce_cached,
            WeakKeyDictionary: lambda known: (WeakKeyDictionary, (dict(known),)),
            MappingProxyType: lambda view: (MappingProxyType, (dict(view),)),
        }
    )


def write(value: object, path: Path, parts: dict[str, Any]) -> None:
    """Store `value` at `path`; tensors keep their aliasing.

    Raises CannotTravel, which names the one of its `parts` that no pickle can hold.
    """
    try:
        torch.save(value, path, pickle_module=sys.modules[__name__])
    except Exception:
        for name, part in parts.items():
            try:
                Pickler(io.BytesIO()).dump(part)
            except Exception as error:
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                used = "".join(f", for it uses `{each}`" for each in _stuck_on(part))
                refusal = CannotTravel(
                    f"{name} ({type(part).__name__}) cannot be sent between processes{used}: "
                    f"{reason}. Send numbers, strings, tensors, or lists and dicts of them, "
                    "and make everything else inside the worker."
                )
                raise errors.alone(refusal) from None
        raise  # of the disk


def _stuck_on(part: Any, above: tuple = ()) -> list[str]:
    """The innermost name in a function's text whose value no pickle can hold, if any."""
    if not isinstance(part, FunctionType) or part in above:
        return []
    used = inspect.getclosurevars(part)
    for name, value in {**used.nonlocals, **used.globals}.items():
        try:
            cloudpickle.dumps(value)
        except Exception:
            inner = _stuck_on(value, (*above, part))
            if inner or not isinstance(value, FunctionType):
                return inner or [name]
    return []


def read(path: Path) -> object:
    """Load what `write` stored; tensors arrive on the CPU, whatever device they left."""
    require_private(path.parent)  # another user's pickle would run here
    return torch.load(path, map_location="cpu", weights_only=False)
