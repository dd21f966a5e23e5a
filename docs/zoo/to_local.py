"""The fault of to_local.md, on two ranks: python to_local.py"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import Partial, Replicate, distribute_tensor

torch.set_default_dtype(torch.float64)


def job(how, rank, size):
    """The weight of a norm, whole on each rank, on this rank's part of the sequence."""
    torch.manual_seed(0)
    x, weight = torch.randn(16, 8), nn.Parameter(torch.rand(8))
    own, local = x.chunk(size)[rank], weight
    if size > 1:
        mesh = init_device_mesh("cpu", (size,))
        weight = nn.Parameter(distribute_tensor(weight.detach(), mesh, [Replicate()]))
        local = weight.redistribute(placements=[Replicate()])
        places = None if how == "wrong" else [Partial()]
        local = local.to_local(grad_placements=places)
    loss = (own * local).square().sum() / x.numel()
    loss.backward()
    gradient = weight.grad.full_tensor() if size > 1 else weight.grad
    return loss.detach() * size, gradient


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
