"""The fault of packed_documents.md, on two ranks: python packed_documents.py"""

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.run import main as torchrun
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.functional import mse_loss, scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_default_dtype(torch.float64)


class Attention(nn.Module):
    """Of this rank's queries, over the keys and values of all ranks."""

    def __init__(self, whole, mask):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.whole, self.mask = whole, mask

    def forward(self, x):
        q, k, v = self.q(x), self.whole(self.k(x)), self.whole(self.v(x))
        return scaled_dot_product_attention(q[None], k[None], v[None], self.mask)[0]


def job(how, rank, size):
    """Two documents of 8 tokens in a sequence that is cut over the ranks."""
    torch.manual_seed(0)

    def whole(own):
        if size > 1:
            own = DTensor.from_local(own, init_device_mesh("cpu", (size,)), [Shard(0)])
            own = own.full_tensor(grad_placements=[Partial()])  # backward sums
        return own

    place, document = torch.arange(16), torch.arange(16) // 8
    mine = place.chunk(size)[rank]
    mask = mine[:, None] >= place
    if how == "right" or size == 1:
        mask = mask & (document[mine][:, None] == document)
    model = Attention(whole, mask)
    x, y = (t.chunk(size)[rank] for t in torch.randn(2, 16, 8))
    net = DDP(model) if size > 1 else model
    loss = mse_loss(net(x), y)
    loss.backward()
    return loss.detach(), model.k.weight.grad


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
