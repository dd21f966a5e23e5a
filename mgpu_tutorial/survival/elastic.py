"""A training run that goes on from its last checkpoint when torchrun starts it again.

    mkdir -p runs
    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # each life has a store of its own
    torchrun --local-addr 127.0.0.1 --nproc-per-node 2 --max-restarts 3 \\
        -m mgpu_tutorial survival.elastic.train --folder runs
"""

import itertools
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.optim import Optimizer

from mgpu_tutorial.shared import checkpoint
from mgpu_tutorial.shared.checkpoint import save_whole


def states_of(things: dict[str, Any]) -> list[dict[str, Any]]:
    """The states of schedulers, scalers and generators, of each rank its own."""
    own = {
        name: thing.state_dict() if hasattr(thing, "state_dict") else thing.get_state()
        for name, thing in things.items()
    }
    every = [own] * dist.get_world_size()
    dist.all_gather_object(every, own)
    return every


def set_states(things: dict[str, Any], saved: dict[str, Any]) -> None:
    """Give each thing what this rank has saved; a new rank gets what an old one has."""
    for name, thing in things.items():
        state = saved["also"][dist.get_rank() % len(saved["also"])][name]
        if hasattr(thing, "load_state_dict"):
            thing.load_state_dict(state)
        else:
            thing.set_state(state)


def resume_or_start(
    path: str,
    model: nn.Module,
    optimizer: Optimizer,
    take_step: Callable,
    steps: int,
    every: int = 3,
    **also: Any,
) -> int:
    """Take the steps that are left, save after each `every` and the last; returns the first.

    `also` are a scheduler, a scaler, a torch.Generator such as `torch.default_generator`, of
    which dropout draws: what has a `state_dict` or a `get_state`. Raises ValueError, on every
    rank, for fewer steps than the file has.
    """
    state = checkpoint.load(path, model, optimizer)
    first = state["step"] if state else 0
    if first > steps:
        raise ValueError(f"{first} steps are done, more than {steps}")
    if state:
        set_states(also, state)
    for step in range(first, steps):
        take_step(step)
        if (step + 1) % every == 0 or step + 1 == steps:
            saved = {"step": step + 1, "also": states_of(also)}
            checkpoint.save(path, model, optimizer, write=save_whole, **saved)
    return first


def train(
    rank: int,
    world_size: int,
    folder: str,
    resume: Callable = resume_or_start,
    steps: int = 12,
) -> int:
    """Train a small network to the end, from wherever its file is; returns the first step.

    Raises ValueError for a file of another number of ranks: their batches are other ones.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.param_groups[0]["ranks"] = world_size  # saved, and loaded, with the rest

    def take_step(step: int) -> None:
        ranks = optimizer.param_groups[0]["ranks"]
        if ranks != world_size:
            why = f"{world_size} would draw other batches: start as many as before"
            raise ValueError(f"the file is of {ranks} ranks, and {why}")
        inputs, targets = batch_of(step, rank)
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()

    return resume(f"{folder}/run.pt", model, optimizer, take_step, steps)


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of one rank in one step: they follow from these two numbers alone."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, 8, generator=generator)
    return inputs, inputs.square().sum(dim=1, keepdim=True)


def train_with_accident(rank: int, world_size: int, folder: str) -> int:
    """The same under torchrun; in its first life rank 1 kills itself after step 7."""
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT")
    if life is None or world_size < 2:
        raise ValueError("start it by torchrun, which counts the lives, on 2 ranks or more")
    dies = rank == 1 and life == "0"
    taken: list[int] = []

    def resume(
        path: str, model: nn.Module, sgd: Optimizer, take_step: Callable, steps: int
    ) -> int:
        def take_or_die(step: int) -> None:
            take_step(step)
            taken.append(step)
            if dies and step == 7:
                print(f"rank {rank}: steps {taken[0]} to 7, then death", flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

        return resume_or_start(path, model, sgd, take_or_die, steps)

    first = train(rank, world_size, folder, resume)
    print(f"rank {rank}: steps {first} to 11", flush=True)
    return first


def leave_together(take_step: Callable, save: Callable) -> Callable:
    """`take_step`, after which all ranks save and leave if one of them has got a SIGTERM.

    From now on that signal only sets a flag on its rank. After each step the ranks ask each
    other for it, with one number; then `save(step)` gets the number of the step that comes
    next, and SystemExit ends the process with code 0. Python lets only the main thread of a
    process set this.
    """
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))

    def take_and_ask(step: int) -> None:
        take_step(step)
        leaving = torch.tensor(float(len(told) > 0))
        dist.all_reduce(leaving, dist.ReduceOp.MAX)
        if leaving:
            save(step + 1)
            sys.exit(0)

    return take_and_ask


def die_at_call(number: int) -> None:
    """This process kills itself at its next call number `number`, in Python or in C."""
    calls = itertools.count(1)

    def count(frame: FrameType, event: str, function: Any) -> None:
        if event in ("call", "c_call") and next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


def samples_of(
    step: int, rank: int, world_size: int, batch: int, samples: int
) -> torch.Tensor:
    """The indices of one rank in one step; all ranks together have `batch` of them."""
    if not 0 < batch <= samples:
        raise ValueError(f"{samples} samples do not fill a batch of {batch}")
    if step < 0 or not 0 <= rank < world_size:
        raise ValueError(f"no step {step} of rank {rank} of {world_size}")
    epoch, place = divmod(step, samples // batch)
    generator = torch.Generator().manual_seed(epoch)
    order = torch.randperm(samples, generator=generator)
    return order[place * batch :][:batch].tensor_split(world_size)[rank]


def train_on(
    rank: int, world_size: int, samples_of: Callable, weight: torch.Tensor, steps: range
) -> torch.Tensor:
    """Steps of a linear model on 50 samples, in batches of 12; returns the weight."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(50, 4, generator=generator, dtype=torch.float64)
    targets = inputs.square().sum(dim=1)
    weight = weight.clone().requires_grad_()
    for step in steps:
        mine = samples_of(step, rank, world_size, 12, len(inputs))
        errors = inputs[mine] @ weight - targets[mine]
        (gradient,) = torch.autograd.grad(errors.square().sum() / 12, weight)
        dist.all_reduce(gradient)  # each divided by the global batch: a sum
        weight.data -= 0.05 * gradient
    return weight.detach()
