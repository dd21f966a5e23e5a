"""The fault of token_means.md, on two ranks: python token_means.py"""

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
    """Labels of -100 don't count, and one rank has more of them than the other."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(8, 5), torch.randn(32, 8), torch.randint(5, (32,))
    y[:7] = -100  # a prompt: it is read, and not learned
    x, y = x.chunk(size)[rank], y.chunk(size)[rank]
    if size > 1:
        model = DDP(model)
    tokens = (y != -100).sum()
    if size > 1 and how == "right":
        dist.all_reduce(tokens)
        tokens = tokens / size  # DDP's mean takes this factor away again
    loss = cross_entropy(model(x), y, reduction="sum") / tokens
    loss.backward()
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
