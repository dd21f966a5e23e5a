"""Save a training run from rank 0, and let all ranks go on from it."""

import hashlib
import io
import os
import pickle
from collections.abc import Callable
from glob import escape
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

    All ranks call it, with the same parameters and optimizer state, whose digits they compare
    first. Buffers, such as running means, are rank 0's. Raises ValueError on every rank,
    before anything is written, for shards, for replicas that have gone apart, and for a path
    that is a folder, or in none.
    """
    _refuse_shards(model, optimizer)
    why = _unreadable(also)
    if dist.get_rank() == 0 and write is None:
        why = why or _no_file(path)
    _refuse_on_all([_digits(model, optimizer)], why)
    if dist.get_rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        (write or save_whole)(path, state | also)


def _refuse_shards(model: nn.Module, optimizer: Optimizer) -> None:
    """ValueError where a parameter is marked as this rank's part of a larger one."""
    marks = ("sharded", "cut", "placements")  # sharding's, tensor parallel's, a DTensor's
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if any(hasattr(each, mark) for each in (*model.parameters(), *held) for mark in marks):
        raise ValueError(
            "model or optimizer are sharded, and rank 0 would write its own part only: of "
            "sharded blocks `root.whole_state()` is the whole, other parts need a file per "
            "rank (save_shards in chapter 15), and DTensors torch.distributed.checkpoint"
        )


def _no_file(path: str) -> str:
    """Why no file can be put at this path, or nothing."""
    whole = Path(path).resolve()
    if whole.is_dir() or not whole.parent.is_dir():
        return f"{path} is a folder, or in one that isn't there: give the path of a file"
    return ""


def _unreadable(also: dict[str, Any]) -> str:
    """Why `load` could not read back what is to be saved beside the tensors, or nothing."""
    for name, value in also.items():
        file = io.BytesIO()
        torch.save(value, file)
        try:
            torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        except pickle.UnpicklingError:
            kind = f"{type(value).__module__}.{type(value).__name__}"
            return (
                f"{name} is a {kind}, and a checkpoint that has one can't be loaded again: "
                "give plain numbers, words, lists, dicts and tensors, such as float(...)"
            )
    return ""


def _refuse_on_all(mine: list, said: str) -> None:
    """ValueError on every rank where one says why it refuses, or has another `mine`."""
    everyone: list = [(said, mine)] * dist.get_world_size()
    if dist.get_world_size() > 1:
        dist.all_gather_object(everyone, (said, mine))
    for rank, (why, theirs) in enumerate(everyone):
        if why:
            raise ValueError(why)
        if theirs != everyone[0][1]:
            raise ValueError(
                f"rank {rank} has other parameters or another optimizer state than rank 0, "
                "which would write its own only: give parts, such as experts, a file per "
                "rank (save_shards in chapter 15), and make replicas equal again before they "
                "are saved"
            )


def _digits(model: nn.Module, optimizer: Optimizer) -> str:
    """Stand for the names, shapes, dtypes and bits that all ranks must have alike."""
    bits = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            bits.update(f"{tuple(value.shape)} {value.dtype}".encode())
            flat = value.detach().cpu().flatten()
            bits.update(flat.view(torch.uint8).numpy())
        elif isinstance(value, dict):
            for name, part in value.items():
                add(str(name))
                add(part)
        elif isinstance(value, list | tuple):
            for part in value:
                add(part)
        elif isinstance(value, str | float | int | None):
            bits.update(repr(value).encode())

    add(dict(model.named_parameters()))
    add(optimizer.state_dict())
    return bits.hexdigest()


def save_whole(path: str, state: dict[str, Any]) -> None:
    """Replace a file whole: a death at any moment leaves the old one or the new one.

    Each save writes a draft with a name of its own beside the file, so two runs never write
    into one. A save that fails takes its draft away; that of a killed process stays until
    `remove_drafts`.
    """
    draft = Path(f"{path}.{uuid4().hex}.draft")
    try:
        with open(draft, "xb") as file:  # follows no link
            torch.save(state, file)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)  # of a full disk, say


def remove_drafts(path: str) -> None:
    """Remove what killed saves to this path have left; call it before a run's first save.

    A notebook that is interrupted kills its ranks, in the middle of a save too.
    """
    whole = Path(path)
    for draft in whole.parent.glob(f"{escape(whole.name)}.{'[0-9a-f]' * 32}.draft"):
        draft.unlink(missing_ok=True)


def load(path: str, model: nn.Module, optimizer: Optimizer, **same: Any) -> dict[str, Any]:
    """Rank 0 reads and sends the state to all ranks, which need no common disk.

    Returns what was saved `also`; {} where there is no file yet. Raises ValueError, on every
    rank, for a file that cannot be read, for one whose values of `same` differ from those
    given on a rank, for shards, and for a folder that cannot be written to. An optimizer's
    state belongs to places in its list: give the parameters in the order of the save.
    """
    _refuse_shards(model, optimizer)
    box = [_read(path) if dist.get_rank() == 0 else {}]
    dist.broadcast_object_list(box, src=0)  # a refusal too: every rank says it
    state = box[0]
    if isinstance(state, str):
        raise ValueError(state)
    if not state:
        return state
    why = _another(path, state, model, optimizer, same)
    _refuse_on_all([], why)
    model.load_state_dict(state.pop("model"))
    optimizer.load_state_dict(state.pop("optimizer"))
    return state


def _another(
    path: str, state: dict, model: nn.Module, optimizer: Optimizer, same: dict
) -> str:
    """A sentence unless the file has the same tensors, and settings of one kind."""
    for name, value in same.items():
        if state.get(name) != value:
            return (
                f"{path} was saved with {name}={state.get(name)!r}, now {name}={value!r} "
                "is asked for: not the same run. Give the old value or another path."
            )
    kinds = [
        {name: _kind(tensor) for name, tensor in tensors.items()}
        for tensors in (state["model"], model.state_dict())
    ]
    decoupled = "decoupled_weight_decay"  # tells AdamW from Adam
    groups = [
        [
            (len(group["params"]), group.get(decoupled), *sorted(group))
            for group in each["param_groups"]
        ]
        for each in (state["optimizer"], optimizer.state_dict())
    ]
    shapes = [p.shape for group in optimizer.param_groups for p in group["params"]]
    for i, kept in state["optimizer"]["state"].items() if groups[0] == groups[1] else ():
        moments = (kept.get(name) for name in ("momentum_buffer", "exp_avg"))
        if any(moment is not None and moment.shape != shapes[i] for moment in moments):
            groups[0] = []  # the same parameters in another order
    for what, (saved, own) in {"model": kinds, "optimizer": groups}.items():
        if saved != own:
            return (
                f"{path} holds another {what}. Nothing was changed: make the {what} that was "
                "saved, or give another path."
            )
    return ""


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
