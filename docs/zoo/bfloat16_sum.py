"""The fault of bfloat16_sum.md, on two ranks: python bfloat16_sum.py"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.run import main as torchrun
from torch.nn.functional import mse_loss

torch.set_default_dtype(torch.float64)


def job(how, rank, size):
    """Gradients of 256 micro-batches add up, on each of the ranks."""
    torch.manual_seed(0)
    model, loss = nn.Linear(8, 4), 0
    x = torch.randn(1024, 8).chunk(size)[rank] + 1
    y = torch.randn(1024, 4).chunk(size)[rank]
    total = torch.zeros(4, 8, dtype=torch.bfloat16 if how == "wrong" else torch.float32)
    for part, target in zip(x.chunk(256), y.chunk(256), strict=True):
        each = mse_loss(model(part), target) / 256
        loss += each.detach()
        total += torch.autograd.grad(each, model.weight)[0].to(total.dtype)
    total = total.double() / size
    if size > 1:
        dist.all_reduce(total)
    return loss, total


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
