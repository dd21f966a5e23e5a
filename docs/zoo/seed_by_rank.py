"""The fault of seed_by_rank.md, on two ranks: python seed_by_rank.py"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.run import main as torchrun
from torch.nn.functional import mse_loss

torch.set_default_dtype(torch.float64)


def job(how, rank, size):
    """Each replica of a sharded model makes its own weights, and nobody sends rank 0's."""
    torch.manual_seed(rank if how == "wrong" else 0)
    model = nn.Linear(8, 4)
    torch.manual_seed(0)
    x, y = torch.randn(16, 8).chunk(size)[rank], torch.randn(16, 4).chunk(size)[rank]
    if size > 1:  # as many replicas as ranks, of one shard each
        names = {"mesh_dim_names": ("replicate", "shard")}
        fully_shard(model, mesh=init_device_mesh("cpu", (size, 1), **names))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss = mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    weight = model.weight
    return loss.detach(), (weight.full_tensor() if size > 1 else weight).detach()


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
