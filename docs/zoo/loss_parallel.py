"""The fault of loss_parallel.md, on two ranks: python loss_parallel.py"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import log_softmax

torch.set_default_dtype(torch.float64)


def job(how, rank, size):
    """A log-softmax over a cut vocabulary, weighted: as in DPO."""
    torch.manual_seed(0)
    logits, weights = torch.randn(6, 8), torch.rand(6, 8)
    logits.requires_grad_()
    if size == 1:
        loss = -(log_softmax(logits, 1) * weights).sum()
        loss.backward()
        return loss.detach(), logits.grad
    mesh = init_device_mesh("cpu", (size,))
    logits = distribute_tensor(logits.detach(), mesh, [Shard(1)]).requires_grad_()
    weights = distribute_tensor(weights, mesh, [Shard(1)])
    if how == "wrong":
        with loss_parallel():
            loss = -(log_softmax(logits, 1) * weights).sum()
            loss.backward()
    else:
        loss = -(log_softmax(logits, 1) * weights).sum()
        loss.backward()
    return loss.full_tensor().detach(), logits.grad.full_tensor()


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
