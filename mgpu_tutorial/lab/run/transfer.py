"""Carry a worker, its arguments and its results between kernel and ranks.

Objects travel through files: a file takes 200 MB as easily as 2 bytes, and a
rank that dies half-way leaves no pipe that somebody still waits on. Functions
of a notebook cell go by value (cloudpickle), package functions by reference,
so that a rank always runs the text that is on disk now.
"""

import types
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from mgpu_tutorial.lab.run.files import require_private

DEEPEST = 20  # steps into containers and functions in search of what cannot be pickled
EMPTY = types.CellType()  # of a name that the function around has not given a value


class CannotTravel(TypeError):
    """An argument or a result that no pickle can hold; the message names it."""


def write(value: object, path: Path, name: str, parts: dict[str, Any] | None = None) -> None:
    """Store `value` at `path`; tensors keep their aliasing.

    Raises CannotTravel, which says which part of `name`, or which of `parts`, cannot be
    stored.
    """
    try:
        torch.save(value, path, pickle_module=cloudpickle)
    except Exception as error:
        problem = _culprit(parts or value, name, error)
        raise CannotTravel(
            f"{problem}. Send numbers, strings, tensors, or lists and "
            "dicts of them, and make everything else inside the worker."
        ) from None


def read(path: Path) -> object:
    """Load what `write` stored; tensors arrive on the CPU, whatever device they left.

    PermissionError where another user could have put the file there: it is a pickle.
    """
    require_private(path.parent)
    return torch.load(path, map_location="cpu", weights_only=False)


def _culprit(value: object, name: str, error: Exception, *around: object) -> str:
    """Descend into containers and functions to the part that does not pickle."""
    if len(around) < DEEPEST:
        around = (*around, value)
        for part_name, part in _parts(value, name):
            try:
                if not any(part is one for one in around):
                    cloudpickle.dumps(part)
            except Exception as part_error:
                return _culprit(part, part_name, part_error, *around)
    reason = next(iter(str(error).splitlines()), type(error).__name__)
    return f"{name} ({type(value).__name__}) cannot be sent between processes: {reason}"


def _parts(value: object, name: str) -> list[tuple[str, object]]:
    """What a container holds, or a function of a cell uses, each with its name."""
    if isinstance(value, dict):
        return [(f"{name}[{key!r}]" if name else str(key), v) for key, v in value.items()]
    if isinstance(value, list | tuple):
        return [(f"{name}[{i}]", v) for i, v in enumerate(value)]
    if isinstance(value, types.FunctionType) and value.__module__ == "__main__":
        used = {n: value.__globals__.get(n) for n in value.__code__.co_names}
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        used |= {n: cell.cell_contents for n, cell in cells if cell != EMPTY}
        return [(f"{n}, which {name} uses,", part) for n, part in used.items()]
    return []
