"""The fault of owners_only.md, on two ranks: python owners_only.py"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import DTensor, Partial

torch.set_default_dtype(torch.float64)


def job(how, rank, size):
    """The log-probability of tokens, over a vocabulary that is cut over the ranks."""

    def everywhere(part):  # the sum over the ranks; its gradient is the same on all
        if size > 1:
            part = DTensor.from_local(part, init_device_mesh("cpu", (size,)), [Partial()])
        return part.full_tensor() if size > 1 else part

    torch.manual_seed(0)
    logits, y = torch.randn(16, 8, requires_grad=True), torch.randint(8, (16,))
    own, first = logits.chunk(size, 1)[rank], rank * 8 // size
    here = (y >= first) & (y < first + own.shape[1])
    target = own.gather(1, (y - first).clamp(0, own.shape[1] - 1)[:, None])[:, 0]
    log_sum = everywhere(own.exp().sum(1)).log()
    if how == "wrong":
        log_probability = everywhere((target - log_sum) * here)
    else:
        log_probability = everywhere(target * here) - log_sum
    loss = -log_probability.mean()
    loss.backward()
    if size > 1:
        dist.all_reduce(logits.grad)  # each rank has the columns of its words
    return loss.detach(), logits.grad


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
