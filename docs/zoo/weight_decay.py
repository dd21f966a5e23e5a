"""The fault of weight_decay.md, on two ranks: python weight_decay.py"""

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
    """AdamW on flat shards; matrices decay, biases don't."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    x, y = torch.randn(16, 8), torch.randn(16, 4)
    loss = mse_loss(model(x), y)
    loss.backward()
    shards = []
    for parameter in model.parameters():
        shard = nn.Parameter(parameter.detach().flatten().chunk(size)[rank])
        shard.grad = parameter.grad.flatten().chunk(size)[rank]
        shard.decays = parameter.dim() > 1 if how != "wrong" else shard.dim() > 1
        shards.append(shard)
    yes, no = ([p for p in shards if p.decays == which] for which in (True, False))
    groups = [{"params": yes, "weight_decay": 0.5}, {"params": no, "weight_decay": 0.0}]
    torch.optim.AdamW([group for group in groups if group["params"]], lr=0.1).step()
    parts = [shards[0].detach()] * size
    if size > 1:
        parts = [torch.empty_like(shards[0]) for _ in range(size)]
        dist.all_gather(parts, shards[0].detach())
    return loss.detach(), torch.cat(parts)


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
            print(f"{how:12} loss {loss:.4f}   weights {found.norm():.4f}   off {off:.1%}")
    dist.destroy_process_group()
