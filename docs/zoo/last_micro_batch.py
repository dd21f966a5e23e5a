"""The fault of last_micro_batch.md, on two ranks: python last_micro_batch.py"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.run import main as torchrun
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_default_dtype(torch.float64)


def job(how, rank, size):
    """Four micro-batches a rank, and something that clears the gradients between them."""
    torch.manual_seed(0)
    model, loss = nn.Linear(8, 4), 0
    x, y = torch.randn(32, 8).chunk(size)[rank], torch.randn(32, 4).chunk(size)[rank]
    if size > 1:
        model = DDP(model)
    micro = 4 if size > 1 else 1
    for part, target in zip(x.chunk(micro), y.chunk(micro), strict=True):
        if how == "wrong":
            model.zero_grad()  # a stage that is set up again, for another length
        each = mse_loss(model(part), target) / micro
        each.backward()
        loss += each.detach()
    return loss, next(model.parameters()).grad


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
