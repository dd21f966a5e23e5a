"""A training script that goes on from its last checkpoint when torchrun starts it again.

    torchrun --nproc-per-node 2 --max-restarts 3 \\
        -m mgpu_tutorial.when_it_breaks.elastic --folder runs
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.shared import checkpoint

STEPS, SAVE_EVERY = 12, 3


def train(rank: int, world_size: int, folder: str, accident: str = "none") -> int:
    """The ranks train for the STEPS steps, or those that are left; returns the first one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    path = f"{folder}/run.pt"
    state = checkpoint.load(path, model, optimizer)
    first = state.get("step", 0)
    for step in range(first, STEPS):
        inputs, targets = batch_of(step, rank)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)
        optimizer.step()
        if (step + 1) % SAVE_EVERY == 0:
            checkpoint.save(path, model, optimizer, step=step + 1)
        if step == 7 and rank == 1 and first == 0:
            suffer(accident)
    return first


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The samples of one rank in one step: they follow from these two numbers alone."""
    lot = torch.Generator().manual_seed(1000 * step + rank)
    inputs = torch.randn(16, 8, generator=lot)
    return inputs, inputs.square().sum(dim=1, keepdim=True)


def suffer(accident: str) -> None:
    """What happens to a process ("worker") or a machine ("node"): SIGKILL, no last words."""
    if accident == "node":
        os.kill(os.getppid(), signal.SIGKILL)  # torchrun, which runs on the same machine
    if accident in ("node", "worker"):
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """One rank of the script, as torchrun starts it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--accident", default="none")
    given = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    first = train(rank, dist.get_world_size(), given.folder, given.accident)
    print(f"rank {rank} has trained steps {first} to {STEPS - 1}", flush=True)
    dist.barrier()  # no rank leaves while another is still at work
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
