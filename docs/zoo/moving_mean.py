"""The fault of moving_mean.md, on two ranks: python moving_mean.py"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.run import main as torchrun
from torch.nn.functional import mse_loss

torch.set_default_dtype(torch.float64)


def job(how, rank, size):
    """Gradients of two calls of a pipeline's schedule are added up."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    x, y = torch.randn(2, 32, 8)
    if size == 1:
        loss = mse_loss(model(x), y)
        loss.backward()
        return loss.detach(), model[0][0].weight.grad

    def loss_of(out, target):
        return mse_loss(out, target) / (2 if how == "wrong" else 2 * 4)

    own, like = (
        model[rank * 4 // size : (rank + 1) * 4 // size],
        x[:4].clone().requires_grad_(),
    )
    stage = PipelineStage(own, rank, size, torch.device("cpu"), like, like)
    losses, loss = [], 0
    schedule = ScheduleGPipe(stage, 4, loss_fn=loss_of, scale_grads=how == "wrong")
    for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
        schedule.step(*[part] * (rank == 0), target=target, losses=losses)
        loss += sum(losses, torch.zeros(())).detach() / (4 if how == "wrong" else 1)
    dist.broadcast(loss, size - 1)
    return loss, model[0][0].weight.grad


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
