"""The fault of positions.md, on two ranks: python positions.py"""

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


class Model(nn.Module):
    """Embeddings of words and places, and a head."""

    def __init__(self):
        super().__init__()
        self.word, self.place = nn.Embedding(10, 8), nn.Embedding(16, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, words, places):
        return self.head((self.word(words) + self.place(places)).tanh())


def job(how, rank, size):
    """A sequence of 16 tokens that is cut over the ranks."""
    torch.manual_seed(0)
    model, text = Model(), torch.randint(10, (17,))
    places = torch.arange(16)
    x, y, places = (t.chunk(size)[rank] for t in (text[:-1], text[1:], places))
    if how == "wrong":
        places = torch.arange(len(x))
    net = DDP(model) if size > 1 else model
    loss = cross_entropy(net(x, places), y)
    loss.backward()
    return loss.detach(), model.place.weight.grad


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
