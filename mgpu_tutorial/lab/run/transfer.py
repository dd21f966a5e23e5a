"""Carry a worker, its arguments and its results between kernel and ranks.

Objects travel through files: a file takes 200 MB as easily as 2 bytes, and a
rank that dies half-way leaves no pipe that somebody still waits on. Functions
of a notebook cell go by value (cloudpickle), package functions by reference,
so that a rank always runs the text that is on disk now.
"""

import types
from pathlib import Path

import cloudpickle
import torch


class CannotTravel(TypeError):
    """An argument or a result that no pickle can hold; the message names it."""


def write(value: object, path: Path, name: str) -> None:
    """Store `value` at `path`; tensors keep their aliasing.

    Raises CannotTravel, which says which part of `name` cannot be stored.
    """
    try:
        torch.save(value, path, pickle_module=cloudpickle)
    except Exception as error:
        part, kind, reason = _culprit(value, name, error)
        raise CannotTravel(
            f"{part} ({kind}) cannot be sent between processes: {reason}. "
            "Send numbers, strings, tensors, or lists and dicts of them, and "
            "make everything else inside the worker."
        ) from None


def read(path: Path) -> object:
    """Load what `write` stored; tensors arrive on the CPU, whatever device they left."""
    return torch.load(path, map_location="cpu", weights_only=False)


def _culprit(value: object, name: str, error: Exception) -> tuple[str, str, str]:
    """Descend into containers and functions to the part that does not pickle."""
    for part_name, part in _parts(value, name):
        try:
            cloudpickle.dumps(part)
        except Exception as part_error:
            return _culprit(part, part_name, part_error)
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return name, type(value).__name__, reason


def _parts(value: object, name: str) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [(f"{name}[{key!r}]" if name else str(key), v) for key, v in value.items()]
    if isinstance(value, list | tuple):
        return [(f"{name}[{i}]", v) for i, v in enumerate(value)]
    if isinstance(value, types.FunctionType) and value.__module__ == "__main__":
        used = value.__code__.co_names
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return [
            (f"{n}, which {name} uses,", value.__globals__[n])
            for n in used
            if n in value.__globals__
        ] + [(f"{n}, which {name} uses,", cell.cell_contents) for n, cell in cells]
    return []
