"""The fault of batch_norm.md, on two ranks: python batch_norm.py"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_default_dtype(torch.float64)


def job(how, rank, size):
    """BatchNorm under data parallelism."""
    torch.manual_seed(0)
    first, norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
    x, y = torch.randn(2, 16, 8) + torch.linspace(-1, 1, 16)[:, None]
    x, y = x.chunk(size)[rank], y.chunk(size)[rank]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm = first, norm

        def forward(self, x):
            x = self.first(x)
            if (
                how == "right" and size > 1
            ):  # the statistics of all rows, as SyncBatchNorm has them
                x = DTensor.from_local(x, init_device_mesh("cpu", (size,)), [Shard(0)])
                x = x.full_tensor(grad_placements=[Partial()])
                return self.norm(x).chunk(size)[rank]
            return self.norm(x)

    model = DDP(Model()) if size > 1 else Model()
    loss = mse_loss(model(x), y)
    loss.backward()
    return loss.detach(), first.weight.grad


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
