"""The fault of row_bias.md, on two ranks: python row_bias.py"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import DTensor, Partial
from torch.nn.functional import mse_loss

torch.set_default_dtype(torch.float64)


def job(how, rank, size):
    """A row-parallel layer: each rank has some inputs of the weight, and the whole bias."""

    def everywhere(part):  # the sum over the ranks; its gradient is the same on all
        if size > 1:
            part = DTensor.from_local(part, init_device_mesh("cpu", (size,)), [Partial()])
        return part.full_tensor() if size > 1 else part

    torch.manual_seed(0)
    layer = nn.Linear(8, 4)
    x, y = torch.randn(16, 8), torch.randn(16, 4)
    part = x.chunk(size, 1)[rank] @ layer.weight.chunk(size, 1)[rank].T
    if how == "wrong":
        out = everywhere(part + layer.bias / size)  # whole it would be there `size` times
    else:
        out = everywhere(part) + layer.bias
    loss = mse_loss(out, y)
    loss.backward()
    return loss.detach(), layer.bias.grad


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
