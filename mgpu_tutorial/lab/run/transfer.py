"""Carry a worker, its arguments and its results between kernel and ranks.

Objects travel through files: a file takes 200 MB as easily as 2 bytes, and a
rank that dies half-way leaves no pipe that somebody still waits on. Functions
of a notebook cell go by value (cloudpickle), package functions by reference,
so that a rank always runs the text that is on disk now.
"""

import functools
import types
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from mgpu_tutorial.lab.run.files import disk_is_full, require_private

DEEPEST = 20  # steps into containers and functions in search of what cannot be pickled
WASTE = 2**16  # bytes of a storage from which on a small view of it travels alone
CACHED = type(functools.cache(len))
EMPTY = types.CellType()  # of a name that the function around has not given a value


class CannotTravel(TypeError):
    """An argument or a result that no pickle can hold; the message names it."""


class _Pickler(cloudpickle.Pickler):
    """Sends a small view of a large tensor without the rest of it, and cached helpers."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is torch.Tensor and _is_small_view(value):
            alone = value.detach().clone().requires_grad_(value.requires_grad)
            return alone.__reduce_ex__(2)
        if isinstance(value, CACHED) and value.__module__ == "__main__":
            return _cached, (value.__wrapped__, value.cache_parameters())
        return super().reducer_override(value)


def _cached(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _is_small_view(tensor: torch.Tensor) -> bool:
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        return False
    whole = tensor.untyped_storage().nbytes()
    return whole >= WASTE and 2 * tensor.numel() * tensor.element_size() < whole


def write(value: object, path: Path, name: str, parts: dict[str, Any] | None = None) -> None:
    """Store `value` at `path`; tensors keep their aliasing, unless they are small views.

    Raises CannotTravel, which says which part of `name`, or which of `parts`, cannot be
    stored, and OSError where the disk is full.
    """
    try:
        pickler = types.SimpleNamespace(Pickler=_Pickler, __name__="cloudpickle")
        torch.save(value, path, pickle_module=pickler)
    except Exception as error:
        if disk_is_full(path.parent):
            place = path.parent.parent.parent
            raise OSError(f"no space is left on the disk of {place}") from None
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
