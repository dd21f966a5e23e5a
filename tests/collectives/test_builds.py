"""Both halves of the ring, right in other words, and wrong as people write them."""

from mgpu_tutorial.collectives.builds import build
from tests.builds import right_and_wrong

FIRST = """
import torch
import torch.distributed as dist

def reduce_scatter_ring(chunks):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        outgoing = chunks[(rank - step) % world_size]
        target = chunks[(rank - step - 1) % world_size]
        incoming = torch.empty_like(target)
        sending = dist.isend(outgoing, right)
        dist.recv(incoming, left)
        sending.wait()
        target += incoming
"""
SECOND = """
import torch
import torch.distributed as dist

def all_gather_ring(chunks):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    for step in range(world_size - 1):
        target = chunks[(rank - step) % world_size]
        sending = dist.isend(chunks[(rank + 1 - step) % world_size], right)
        dist.recv(target, left)
        sending.wait()
"""
WHOLE = """
import torch.distributed as dist

def ring_all_reduce(tensor):
    chunks = tensor.tensor_split(dist.get_world_size())
    reduce_scatter_ring(chunks)
    all_gather_ring(chunks)
"""
RECEIVE = "dist.recv(incoming, left)\n        sending.wait()"
BOTH = "sending = dist.isend(outgoing, right)\n        " + RECEIVE
ARRIVING = "incoming = torch.empty_like(target)\n        dist.recv(incoming, left)"
EVEN_FIRST = """\
if rank % 2:
            dist.recv(incoming, left)
            dist.send(outgoing, right)
        else:
            receiving = dist.irecv(incoming, left)
            dist.send(outgoing, right)
            receiving.wait()"""
SENT_FIRST = "sending = dist.isend(chunks[(rank + 1 - step) % world_size], right)\n"
SENT_FIRST += "        dist.recv(target, left)\n        sending.wait()"
RECEIVED_FIRST = "receiving = dist.irecv(target, left)\n"
RECEIVED_FIRST += "        dist.send(chunks[(rank + 1 - step) % world_size], right)\n"
RECEIVED_FIRST += "        receiving.wait()"


def first(old, new):
    assert old in FIRST
    return FIRST.replace(old, new)


def second(old, new):
    assert old in SECOND
    return SECOND.replace(old, new)


def whole(old, new):
    assert old in WHOLE
    return WHOLE.replace(old, new)


RIGHT = [
    first("target += incoming", "target.add_(incoming)"),
    first(BOTH, EVEN_FIRST),
    first("incoming = torch.empty_like(target)", "incoming = target.clone()"),
    second("target = chunks[(rank - step) % world_size]", "target = chunks[rank - step]"),
    second("dist.recv(target, left)", ARRIVING + "\n        target.copy_(incoming)"),
    second(SENT_FIRST, RECEIVED_FIRST),
    whole("tensor.tensor_split(", "torch.tensor_split(tensor, ").replace(
        "import", "import torch\nimport", 1
    ),
    whole("    chunks =", "    tensor = tensor.view(-1)\n    chunks ="),
    FIRST + SECOND.partition("as dist\n")[2] + WHOLE.partition("as dist\n")[2],
]
WRONG = [
    (first("target += incoming", "target = target + incoming"), "on 2 ranks"),
    (first("range(world_size - 1)", "range(world_size)"), "[1, 1, 1, 1], expected"),
    (first("(rank - step) %", "(rank + step) %"), "on 3 ranks"),
    (first(BOTH, "dist.send(outgoing, right)\n        dist.recv(incoming, left)"), "send"),
    (first("incoming = torch.empty_like(target)", "incoming = torch.zeros(1)"), ""),
    (second("dist.recv(target, left)", ARRIVING + "\n        target += incoming"), "chunk"),
    (
        second("dist.recv(target, left)", ARRIVING + "\n        target += incoming - target"),
        "is not what was sent",
    ),
    (second("(rank + 1 - step)", "(rank - step)"), "chunk"),
    (second("range(world_size - 1)", "range(world_size - 2)"), "on 2 ranks, chunk"),
    (second("dist.recv(target, left)", "dist.recv(target.clone(), left)"), "chunk"),
    (whole("tensor.tensor_split", "tensor.clone().tensor_split"), "on 2 ranks, rank 0 holds"),
    (whole("    all_gather_ring(chunks)\n", ""), "on 2 ranks, rank 0 holds"),
    (whole("    reduce_scatter_ring(chunks)\n", ""), "on 2 ranks, rank 0 holds"),
    (whole("dist.get_world_size()", "2"), "index out of range"),
    (whole("    chunks =", "    return dist.all_reduce(tensor)\n    chunks ="), "sends 0"),
]


test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG)
