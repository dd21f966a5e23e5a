"""Save a training run from rank 0, and let all ranks go on from it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer


def save(
    path: str,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    write: Callable[[str, dict], None] | None = None,
    **also: Any,
) -> None:
    """Rank 0 alone writes, by `write(path, state)`, which is `save_whole` if none is given.

    All ranks have the same model and optimizer state. Raises ValueError for shards.
    """
    marks = ("sharded", "cut")  # of sharding's parameters, and of tensor parallel's
    if any(hasattr(parameter, mark) for parameter in model.parameters() for mark in marks):
        raise ValueError(
            "model or optimizer are sharded, and rank 0 would write its own part only: use "
            "save_shards, by which each rank writes what it has"
        )
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        (write or save_whole)(path, state | also)


def save_whole(path: str, state: dict[str, Any]) -> None:
    """Replace a file whole: a death at any moment leaves the old one or the new one.

    Each save writes a draft with a name of its own beside the file, so two runs never write
    into one. A save that fails takes its draft away; only that of a killed process stays.
    """
    draft = Path(f"{path}.{uuid4().hex}.draft")
    try:
        with open(draft, "xb") as file:  # made anew: no link that is there is followed
            torch.save(state, file)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)  # of a full disk, say


def load(path: str, model: nn.Module, optimizer: Optimizer, **same: Any) -> dict[str, Any]:
    """Rank 0 reads and sends the state to all ranks, which need no common disk.

    Returns what was saved `also`; {} where there is no file yet. Raises ValueError for a
    file that cannot be read, for one whose values of `same` differ from those given, and for
    a folder that cannot be written to.
    """
    box = [_read(path) if dist.get_rank() == 0 else {}]
    dist.broadcast_object_list(box, src=0)  # a refusal too: every rank says it
    state = box[0]
    if isinstance(state, str):
        raise ValueError(state)
    if not state:
        return state
    for name, value in same.items():
        if state.get(name) != value:
            raise ValueError(
                f"{path} was saved with {name}={state.get(name)!r}, now {name}={value!r} "
                "is asked for: not the same run. Give the old value or another path."
            )
    _refuse_another(path, state, model, optimizer)
    model.load_state_dict(state.pop("model"))
    optimizer.load_state_dict(state.pop("optimizer"))
    return state


def _refuse_another(path: str, state: dict, model: nn.Module, optimizer: Optimizer) -> None:
    """Before anything is loaded: the file has the same tensors, and settings of one kind."""
    kinds = [
        {name: _kind(tensor) for name, tensor in tensors.items()}
        for tensors in (state["model"], model.state_dict())
    ]
    groups = [
        [(len(group["params"]), *sorted(group)) for group in each["param_groups"]]
        for each in (state["optimizer"], optimizer.state_dict())
    ]
    shapes = [p.shape for group in optimizer.param_groups for p in group["params"]]
    for i, kept in state["optimizer"]["state"].items() if groups[0] == groups[1] else ():
        moments = (kept.get(name) for name in ("momentum_buffer", "exp_avg"))
        if any(moment is not None and moment.shape != shapes[i] for moment in moments):
            groups[0] = []  # the same parameters in another order
    for what, (saved, own) in {"model": kinds, "optimizer": groups}.items():
        if saved != own:
            raise ValueError(
                f"{path} holds another {what}. Nothing was changed: make the {what} that was "
                "saved, or give another path."
            )


def _kind(tensor: Any) -> tuple:
    """What two tensors must have alike, so that one can take the other's values whole."""
    return getattr(tensor, "shape", None), getattr(tensor, "dtype", None)


def _read(path: str) -> dict[str, Any] | str:
    """What the file holds; {} where there is none, and a sentence where it is refused."""
    folder = Path(path).resolve().parent
    if not os.access(folder, os.W_OK):  # say it now, not after the first epoch
        return f"checkpoint={path!r}: no folder {folder} that can be written to"
    if not os.path.exists(path):
        return {}
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if not {"model", "optimizer"} <= set(state):
            raise KeyError("no model and optimizer in it")
        return state
    except Exception as error:  # whatever a torn file makes the reader raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return (
            f"{path} holds no readable checkpoint ({reason}). Nothing was changed: move the "
            "file away to start anew, or give another path."
        )
