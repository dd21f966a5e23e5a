"""The fault of scaled_again.md, on two ranks: python scaled_again.py"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.run import main as torchrun
from torch.nn.functional import mse_loss

torch.set_default_dtype(torch.float64)
MICRO = 4


def job(how, rank, size):
    """Four layers in a pipeline, four micro-batches."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
    x, y = torch.randn(2, 16, 8)
    if size == 1:
        loss = mse_loss(model(x), y)
        loss.backward()
        return loss.detach(), model[0][0].weight.grad

    stage, is_last = model[rank * 4 // size : (rank + 1) * 4 // size], rank == size - 1
    kept, logged = [], torch.zeros(())
    for part, target in zip(x.chunk(MICRO), y.chunk(MICRO), strict=True):
        if rank > 0:
            part = torch.empty_like(part)
            dist.recv(part, rank - 1)
        out = stage(part.requires_grad_())
        if is_last:
            out = mse_loss(out, target)
            logged += out.detach() / MICRO
        else:
            dist.send(out.detach(), rank + 1)
        kept.append((part, out))
    for part, out in kept:
        gradient = torch.ones_like(out)
        if not is_last:
            dist.recv(gradient, rank + 1)
        if is_last or how == "wrong":
            gradient = gradient / MICRO
        out.backward(gradient)
        if rank > 0:
            dist.send(part.grad, rank - 1)
    dist.broadcast(logged, size - 1)
    return logged, model[0][0].weight.grad


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
