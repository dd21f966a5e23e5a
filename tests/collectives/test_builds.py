"""Both halves of the ring, right in other words, and wrong as people write them."""

from mgpu_tutorial.collectives.builds import build
from tests.builds import Right, Wrong, edited

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
    Right("reduce_scatter_ring", replace={"sending =…": EVEN_FIRST}),
    Wrong(
        "reduce_scatter_ring", replace={ADD: "target = target + incoming"}, says="on 2 ranks"
    ),
    Wrong(
        "reduce_scatter_ring",
        replace={"(rank - step) %": "(rank + step) %"},
        says="on 3 ranks",
    ),
    Wrong(
        "reduce_scatter_ring",
        replace={"sending = dist.isend": "dist.send", "sending.wait()": ""},
        says="deadlock: 0 → 1 → 0",
    ),
    Wrong(
        "reduce_scatter_ring",
        replace={EMPTY: "incoming = torch.empty_like(outgoing)"},
        says="24 vs 16",
    ),
    Wrong(
        "reduce_scatter_ring",
        replace={"sending.wait()": ""},
        says="never waited for the isend at <cell",
    ),
    Wrong(
        "reduce_scatter_ring",
        replace={ADD: f"{ADD}; assert target[0] == target[0]"},
        says="IndexError",
    ),  # an empty chunk
]
RECV = "dist.recv(target, group=group, group_src=left)"
ARRIVES = f"{EMPTY}\n        {RECV.replace('target', 'incoming')}\n        "
GATHER = [
    Right("all_gather_ring", replace={RECV: f"{ARRIVES}target.copy_(incoming)"}),
    Wrong(
        "all_gather_ring",
        replace={RECV: f"{ARRIVES}target.add_(incoming - target)"},
        says="are not what was sent",
    ),
    Wrong(
        "all_gather_ring",
        replace={RECV: RECV.replace("target", "target.clone()")},
        says="not what",
    ),
    Wrong("all_gather_ring", replace={"(rank + 1 - step)": "(rank - step)"}, says="not what"),
]
LAST, COUNT = "all_gather_ring(chunks, group)", "dist.get_world_size(group)"
OWN_ORDER = """rank, world_size = dist.get_rank(), dist.get_world_size()
    every = [torch.empty_like(tensor) for _ in range(world_size)]
    dist.all_gather(every, tensor)
    tensor.copy_(sum(every[rank:] + every[:rank]))"""
RING = [
    Right(
        "ring_all_reduce",
        replace={"tensor.view(-1).tensor_split(": "torch.tensor_split(tensor, "},
    ),
    Wrong(
        "ring_all_reduce",
        replace={"tensor.view(-1)": "tensor.clone()"},
        says="on 2 ranks, rank 0 holds",
    ),
    Wrong(
        "ring_all_reduce",
        replace={COUNT: "2"},
        says="a chunk for each rank: world size 1, got 2",
    ),
    Wrong(
        "ring_all_reduce",
        replace={f"view(-1).tensor_split({COUNT})": f"view({COUNT}, -1)"},
        says="size 1003",
    ),
    Wrong(
        "ring_all_reduce",
        replace={LAST: f"{LAST}\n    {LAST}"},
        says="from rank 0: 9 of them, expected 6",
    ),
    Wrong(
        "ring_all_reduce",
        replace={"chunks =…": OWN_ORDER},
        says="numbers differ between ranks 0 and 1",
    ),
    Wrong(
        "ring_all_reduce",
        replace={COUNT: "dist.get_world_size()"},
        says="world size 2, got 4 chunks",
    ),
    Wrong(
        "ring_all_reduce",
        replace={"chunks =…": "dist.all_reduce(tensor)"},
        says="from rank 0: 0 of them, expected 6",
    ),
]
test_right, test_wrong = edited(build, [*SCATTER, *GATHER, *RING])
