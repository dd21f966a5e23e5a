"""A training script that goes on from its last checkpoint when torchrun starts it again.

    torchrun --nproc-per-node 2 --max-restarts 3 \\
        -m mgpu_tutorial.survival.elastic --folder runs
"""

import argparse
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

STEPS, SAVE_EVERY = 12, 3


def resume_or_start(
    path: str, model: nn.Module, optimizer: Optimizer, take_step: Callable, steps: int
) -> int:
    """Take the steps that are left, and save after every third; returns the first one."""
    state = checkpoint.load(path, model, optimizer)
    first = state.get("step", 0)
    for step in range(first, steps):
        take_step(step)
        if (step + 1) % SAVE_EVERY == 0:
            checkpoint.save(path, model, optimizer, step=step + 1)
    return first


def train(
    rank: int, world_size: int, folder: str, steps: int = STEPS, accident: bool = False
) -> int:
    """Train a small network to the end, from wherever its file is; returns the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def take_step(step: int) -> None:
        inputs, targets = batch_of(step, rank)
        optimizer.zero_grad()
        mse_loss(model(inputs), targets).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        if accident and (step, rank) == (7, 1):
            die_once()

    return resume_or_start(f"{folder}/run.pt", model, optimizer, take_step, steps)


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of one rank in one step: they follow from these two numbers alone."""
    lot = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, 8, generator=lot)
    return inputs, inputs.square().sum(dim=1, keepdim=True)


def die_once() -> None:
    """In its first life under torchrun this process kills itself."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def die_at_call(number: int) -> None:
    """This process kills itself at its next call number `number`, in Python or in C."""
    calls = itertools.count(1)

    def count(frame: FrameType, event: str, function: Any) -> None:
        if event in ("call", "c_call") and next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)


def main() -> None:
    """One rank of the script, as torchrun starts it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--accident", action="store_true")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    first = train(rank, world_size, given.folder, accident=given.accident)
    print(f"rank {rank} has trained steps {first} to {STEPS - 1}", flush=True)
    dist.barrier()  # no rank leaves while another is still at work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
