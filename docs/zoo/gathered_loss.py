"""The fault of gathered_loss.md, on two ranks: python gathered_loss.py"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.run import main as torchrun
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_default_dtype(torch.float64)


def job(how, rank, size):
    """A contrastive loss: each sample against the samples of all ranks."""
    torch.manual_seed(0)
    model, x = nn.Linear(8, 4), torch.randn(8, 8).chunk(size)[rank]
    if size > 1:
        model = DDP(model)
    own = model(x)
    every = [own]
    if size > 1:
        every = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(every, own.detach())
        every[rank] = own  # the usual recipe: only this part has a gradient
    z = torch.cat(every)
    loss = cross_entropy(z @ z.T, torch.arange(8).roll(1))
    (loss if how == "wrong" else loss * size).backward()
    return loss.detach(), next(model.parameters()).grad


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
