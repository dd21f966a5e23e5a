"""The fault of sum_loss.md, on two ranks: python sum_loss.py"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.run import main as torchrun

torch.set_default_dtype(torch.float64)


def job(how, rank, size):
    """Four layers in a pipeline; the loss is a mean over 64 tokens."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    x, y = torch.randn(2, 64, 8)

    def loss_of(out, target):
        total = (out - target).square().sum()
        return total if how == "wrong" and size > 1 else total / 64

    if size == 1:
        loss = loss_of(model(x), y)
        loss.backward()
        return loss.detach(), model[0][0].weight.grad
    own, like = (
        model[rank * 4 // size : (rank + 1) * 4 // size],
        x[:16].clone().requires_grad_(),
    )
    stage = PipelineStage(own, rank, size, torch.device("cpu"), like, like)
    losses = []
    schedule = ScheduleGPipe(stage, 4, loss_fn=loss_of, scale_grads=False)
    schedule.step(*[x] * (rank == 0), target=y, losses=losses)
    loss = sum(losses, torch.zeros(())).detach()
    dist.broadcast(loss, size - 1)
    return loss / (64 if how == "wrong" else 1), model[0][0].weight.grad


if __name__ == "__main__":
    if "RANK" not in os.environ:  # start two ranks of this file
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        how = ["--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
        sys.exit(torchrun([*how, *sys.argv]))
    dist.init_process_group("gloo", timeout=timedelta(minutes=1))
    world = dist.get_rank(), dist.get_world_size()
    rows = {how: job(how, *world) for how in sys.argv[1:] or ("wrong", "right")}
    right = job("right", 0, 1) if len(rows) == 2 else None
    for how, (loss, found) in ({"one process": right} | rows).items() if right else ():
        dist.all_reduce(loss)  # what is logged: the mean over the ranks
        if world[0] == 0:
            off = (found - right[1]).norm() / right[1].norm()
            loss /= world[1]
            print(f"{how:12} loss {loss:.4f}   gradient {found.norm():.4f}   off {off:.1%}")
    dist.destroy_process_group()
