"""The fault of dropout_masks.md, on two ranks: python dropout_masks.py"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.run import main as torchrun
from torch.nn.functional import dropout

torch.set_default_dtype(torch.float64)


def job(how, rank, size):
    """Dropout on a batch of 16 rows: how far does the batch's mean stray from 1?"""
    torch.manual_seed(0)  # the same weights everywhere
    if how == "right":
        torch.manual_seed(1000 + rank)  # from here on other numbers on each rank
    masks = dropout(torch.ones(16 // size, 512), 0.5)
    every = [masks] * size
    if size > 1:
        every = [torch.empty_like(masks) for _ in range(size)]
        dist.all_gather(every, masks)
    masks = torch.cat(every)
    return torch.tensor(float(len(masks.unique(dim=0)))), masks.mean(0)


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
            print(f"{how:12} {loss:.0f} of 16 masks differ   spread {found.std():.3f}")
    dist.destroy_process_group()
