"""A checkpoint of what is sharded: a file of each rank, for as many ranks again."""

from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from mgpu_tutorial.sharding.refusals import require_member
from mgpu_tutorial.shared.checkpoint import save_whole


def save_shards(
    folder: str,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    group: dist.ProcessGroup | None = None,
    **also: Any,
) -> None:
    """Each rank writes what it holds into a file of its own; all wait for the last one.

    At any stage of ZeRO, give the optimizer of this rank. `also` is the same on all ranks,
    such as the number of steps. A rank that dies leaves its old file: see `load_shards`.
    `group` are the ranks that share the model, all by default; where several groups save,
    each has a folder of its own. Raises ValueError, on every rank, where one has no such
    folder.
    """
    require_member(group)
    optimizer = getattr(optimizer, "inner", optimizer)  # of a ShardedOptimizer
    if tensors := [name for name, value in also.items() if torch.is_tensor(value)]:
        raise ValueError(
            f"{', '.join(tensors)} is a tensor, which the ranks can't compare when they "
            "load: give numbers and words, and keep a tensor as a buffer of the model"
        )
    said = "" if Path(folder).is_dir() else f"there is no folder {folder}: make it first"
    answers: list[tuple] = [()] * dist.get_world_size(group)
    dist.all_gather_object(answers, (said, uuid4().hex), group=group)
    if refused := next((said for said, _ in answers if said), ""):
        raise ValueError(refused)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "also": also}
    state["kind"] = type(optimizer).__name__
    state["save"] = answers[0][1]  # rank 0's, by which the files of one save know each other
    save_whole(_file(folder, group), state)
    dist.barrier(group)


def load_shards(
    folder: str,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Each rank reads its own file; returns what was saved `also`.

    Model and optimizer are sharded as they were. Raises ValueError on every rank, before
    anything is loaded, where another number of ranks has saved, where a rank's file is
    missing, torn, of another model, of another kind of optimizer, of another save, or with
    other words in `also`. `group` are the ranks that have saved together.
    """
    require_member(group)
    optimizer = getattr(optimizer, "inner", optimizer)  # of a ShardedOptimizer
    path = _file(folder, group)
    state, said = {}, ""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        said = _another(path, state, model, optimizer)
    except FileNotFoundError:
        files = sorted(each.name for each in Path(folder).glob("rank-*-of-*.pt"))
        said = f"there is no {path}, but {', '.join(files[:3]) or 'no checkpoint'}"
    except Exception as error:  # whatever a torn file makes the reader raise
        said = f"{path} can't be read ({type(error).__name__})"
    answers: list[tuple] = [()] * dist.get_world_size(group)
    mine = said, state.get("also"), state.get("save")
    dist.all_gather_object(answers, mine, group=group)
    refused = next((said for said, *_ in answers if said), "")
    if not refused and any(also != state["also"] for _, also, _ in answers):
        refused = f"the files of the ranks say {[also for _, also, _ in answers]}"
    if not refused and len({save for *_, save in answers}) > 1:
        refused = f"the files in {folder} are not all of one save"
    if refused:
        how = "as many ranks, the same model and kind of optimizer, from one complete save"
        raise ValueError(f"{refused}: load with {how}")
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["also"]


def _another(path: str, state: dict, model: nn.Module, optimizer: Optimizer) -> str:
    """A sentence where a file isn't of this model and optimizer, sharded as they are."""
    names = [
        {name: (value.shape, value.dtype) for name, value in tensors.items()}
        for tensors in (state["model"], model.state_dict())
    ]
    counts = [
        [len(options["params"]) for options in each["param_groups"]]
        for each in (state["optimizer"], optimizer.state_dict())
    ]
    kind = type(optimizer).__name__
    if state.get("kind", kind) != kind:
        return f"{path} is of the optimizer {state['kind']}, and this one is {kind}"
    if names[0] == names[1] and counts[0] == counts[1]:
        return ""
    return f"{path} is of another model, or of one that was sharded in another way"


def _file(folder: str, group: dist.ProcessGroup | None) -> str:
    return f"{folder}/rank-{dist.get_rank(group)}-of-{dist.get_world_size(group)}.pt"
