"""The fault of tied_stages.md, on two ranks: python tied_stages.py"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.run import main as torchrun
from torch.nn.functional import cross_entropy

torch.set_default_dtype(torch.float64)


def job(how, rank, size):
    """An embedding on the first stage, and the same weight as the head on the last."""
    torch.manual_seed(0)
    words, head = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
    head.weight = words.weight
    layers = (
        nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
        nn.Sequential(nn.Linear(8, 8), nn.Tanh()),
    )
    model = nn.Sequential(words, *layers, head)
    x, y = torch.randint(10, (2, 16))
    if size == 1:
        loss = cross_entropy(model(x), y)
        loss.backward()
        return loss.detach(), words.weight.grad
    own = model[rank * 4 // size : (rank + 1) * 4 // size]
    stage, losses = PipelineStage(own, rank, size, torch.device("cpu")), []
    schedule = ScheduleGPipe(stage, 4, loss_fn=cross_entropy)
    schedule.step(*[x] * (rank == 0), target=y, losses=losses)
    gradient = torch.zeros(10, 8) if words.weight.grad is None else words.weight.grad
    if how == "right":
        dist.all_reduce(gradient)
    loss = sum(losses, torch.zeros(())).detach() / 4
    dist.broadcast(loss, size - 1)
    return loss, gradient


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
