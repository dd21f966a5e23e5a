"""The fault of experts.md, on two ranks: python experts.py"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import DTensor, Shard

torch.set_default_dtype(torch.float64)


def job(how, rank, size):
    """Four experts on the ranks, and a batch of groups with a token for each expert."""
    torch.manual_seed(0)
    x, experts = torch.randn(8, 4, 8).chunk(size)[rank], torch.randn(4, 8, 8)
    own = nn.Parameter(experts.chunk(size)[rank].clone())

    def send(tokens, come, go):  # an all-to-all, and another one in backward
        if size > 1:
            mesh = init_device_mesh("cpu", (size,))
            tokens = DTensor.from_local(tokens, mesh, [Shard(come)])
            tokens = tokens.redistribute(placements=[Shard(go)]).to_local()
        return tokens

    there = send(x, 0, 1)  # some groups with all experts, then all groups with some
    out = torch.einsum("gex,exy->gey", there, own)
    loss = send(out, 1, 0).square().mean()  # of this rank's tokens; the rest is averaged
    loss.backward()
    if how == "right":
        own.grad /= size
    parts = [own.grad] * size
    if size > 1:
        parts = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(parts, own.grad)
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
            print(f"{how:12} loss {loss:.4f}   gradient {found.norm():.4f}   off {off:.1%}")
    dist.destroy_process_group()
