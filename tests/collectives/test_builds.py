"""Both halves of the ring, right in other words, and wrong as people write them."""

from mgpu_tutorial.collectives.builds import build
from tests.builds import edited

EVEN_FIRST = """if rank % 2:
            dist.recv(incoming, group=group, group_src=left)
            dist.send(outgoing, group=group, group_dst=right)
        else:
            receiving = dist.irecv(incoming, group=group, group_src=left)
            dist.send(outgoing, group=group, group_dst=right)
            receiving.wait()
        target += incoming"""
ADD, EMPTY = "target += incoming", "incoming = torch.empty_like(target)"
SCATTER = [
    ("sending =…", EVEN_FIRST),
    (ADD, "target = target + incoming", "on 2 ranks"),
    ("(rank - step) %", "(rank + step) %", "on 3 ranks"),
    ("sending = dist.isend", "dist.send", "sending.wait()", "", "deadlock: 0 → 1 → 0"),
    (EMPTY, "incoming = torch.empty_like(outgoing)", "24 vs 16"),
    ("sending.wait()", "", "never waited for the isend at <cell"),
    (ADD, f"{ADD}; assert target[0] == target[0]", "IndexError"),  # an empty chunk
]
RECV = "dist.recv(target, group=group, group_src=left)"
ARRIVES = f"{EMPTY}\n        {RECV.replace('target', 'incoming')}\n        "
GATHER = [
    (RECV, f"{ARRIVES}target.copy_(incoming)"),
    (RECV, f"{ARRIVES}target.add_(incoming - target)", "are not what was sent"),
    (RECV, RECV.replace("target", "target.clone()"), "not what"),
    ("(rank + 1 - step)", "(rank - step)", "not what"),
]
LAST, COUNT = "all_gather_ring(chunks, group)", "dist.get_world_size(group)"
OWN_ORDER = """rank, world_size = dist.get_rank(), dist.get_world_size()
    every = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(every, tensor)
    tensor.copy_(sum(every[rank:] + every[:rank]))"""
RING = [
    ("tensor.view(-1).tensor_split(", "torch.tensor_split(tensor, "),
    ("tensor.view(-1)", "tensor.clone()", "on 2 ranks, rank 0 holds"),
    (COUNT, "2", "a chunk for each rank: world size 1, got 2"),
    (f"view(-1).tensor_split({COUNT})", f"view({COUNT}, -1)", "size 1003"),
    (LAST, f"{LAST}\n    {LAST}", "from rank 0: 9 of them, expected 6"),
    ("chunks =…", OWN_ORDER, "numbers differ between ranks 0 and 1"),
    (COUNT, "dist.get_world_size()", "world size 2, got 4 chunks"),
    ("chunks =…", "dist.all_reduce(tensor)", "from rank 0: 0 of them, expected 6"),
]
test_right, test_wrong = edited(
    build,
    {"reduce_scatter_ring": SCATTER, "all_gather_ring": GATHER, "ring_all_reduce": RING},
)
