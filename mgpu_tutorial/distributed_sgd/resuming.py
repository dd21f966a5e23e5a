"""What a run must save, so that a new process takes the same next step."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import nll_loss
from torch.optim.lr_scheduler import LambdaLR

from mgpu_tutorial.data_partitioning import global_batches
from mgpu_tutorial.distributed_sgd.sgd import average_gradients, flat_parameters, new_model
from mgpu_tutorial.shared.data import Digits, digits


def new_run(rank: int) -> dict[str, Any]:
    """A model with dropout, a falling learning rate, and the number of the next step."""
    model, optimizer = new_model(dropout=0.5)
    torch.manual_seed(rank)  # dropout draws other numbers on each rank
    scheduler = LambdaLR(optimizer, lambda step: 1 - step / 8)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "step": 0}


def go_on(run: dict[str, Any], data: Digits, steps: int) -> None:
    """Take the next `steps` steps of a run."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shares = global_batches(rank, world_size, len(data), batch=60, seed=1, epoch=0)
    for mine in shares[run["step"] :][:steps]:
        run["optimizer"].zero_grad()
        nll_loss(run["model"](data.images[mine]), data.labels[mine]).backward()
        average_gradients(run["model"])
        run["optimizer"].step()
        run["scheduler"].step()
        run["step"] += 1


def save_run(run: dict[str, Any]) -> dict[str, Any]:
    """A copy of everything that the next step depends on."""
    saved = {name: run[name].state_dict() for name in ("model", "optimizer", "scheduler")}
    saved |= {"generator": torch.get_rng_state(), "step": run["step"]}
    return copy.deepcopy(saved)


def load_run(run: dict[str, Any], saved: dict[str, Any]) -> None:
    """Restore the parts that are in `saved`; the others stay as they are in a new run."""
    for name in saved.keys() & {"model", "optimizer", "scheduler"}:
        run[name].load_state_dict(saved[name])
    run["step"] = saved.get("step", 0)
    torch.set_rng_state(saved.get("generator", torch.get_rng_state()))


def stop_and_resume(
    rank: int, world_size: int, forget: str = "", stop_after: int = 3
) -> torch.Tensor:
    """Six steps, with a checkpoint on the way that lacks `forget`; returns the parameters."""
    run, data = new_run(rank), digits()
    go_on(run, data, stop_after)
    saved = save_run(run)
    saved.pop(forget, None)
    run = new_run(rank)  # all that a new process has
    load_run(run, saved)
    go_on(run, data, 6 - stop_after)
    return flat_parameters(run["model"])
