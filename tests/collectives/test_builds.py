"""Both halves of the ring, right in other words, and wrong as people write them."""

from mgpu_tutorial.collectives.builds import build
from tests.builds import Right, Wrong, edited

ASKED_FIRST = """receiving = dist.irecv(incoming, group=group, group_src=left)
        dist.send(outgoing, group=group, group_dst=right)
        receiving.wait()
        target += incoming"""
BATCH = """ops = [
            dist.P2POp(dist.isend, outgoing, group=group, group_peer=right),
            dist.P2POp(dist.irecv, incoming, group=group, group_peer=left),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        target += incoming"""
ADD, EMPTY = "target += incoming", "incoming = torch.empty_like(target)"
SCATTER = [
    Right("reduce_scatter_ring", replace={"sending =…": ASKED_FIRST}),
    Right("reduce_scatter_ring", replace={"sending =…": BATCH}),
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
        says="24 bytes came where there was room for 16",
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
        says="is not what was sent, but off by",
    ),
    Wrong(
        "all_gather_ring",
        replace={RECV: RECV.replace("target", "target.clone()")},
        says="on 2 ranks, chunk 0 of rank 0",
    ),
    Wrong(
        "all_gather_ring",
        replace={"(rank + 1 - step)": "(rank - step)"},
        says="on 2 ranks, chunk 0 of rank 0",
    ),
]
LAST, COUNT = "all_gather_ring(chunks, group)", "dist.get_world_size(group)"
RIGHT = "(dist.get_rank(group) + 1) % dist.get_world_size(group)"
ONE_MORE = f"dist.isend(tensor, group=group, group_dst={RIGHT}).wait()"
STARTED = """sending = dist.isend(outgoing, group=group, group_dst=right)
        dist.recv(incoming, group=group, group_src=left)
        sending.wait()"""
BY_HAND = f"""rank, size = dist.get_rank(group), dist.get_world_size(group)
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = tensor.tensor_split(size)
    for step in range(2 * size - 2):
        outgoing, target = chunks[(rank - step) % size], chunks[(rank - step - 1) % size]
        incoming = torch.empty_like(target)
        {STARTED}
        target.copy_(target + incoming if step < size - 1 else incoming)"""
BY_TURNS = """if rank % 2:
            dist.recv(incoming, group=group, group_src=left)
            dist.send(outgoing, group=group, group_dst=right)
        else:
            dist.send(outgoing, group=group, group_dst=right)
            dist.recv(incoming, group=group, group_src=left)"""
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
    Wrong("ring_all_reduce", replace={COUNT: "2"}, says="on 3 ranks"),
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
    Right("ring_all_reduce", replace={"chunks =…": BY_HAND}),
    Wrong(
        "ring_all_reduce",
        replace={"chunks =…": BY_HAND.replace("group=group, group_dst=right", "right")},
        says="sends to itself (dst=1; did you mean group_dst?)",
    ),
    Wrong(
        "ring_all_reduce",
        replace={LAST: f"{LAST}\n    {ONE_MORE}"},
        says="on 1 rank: rank 0 raised RuntimeError: Pair is not connected",
    ),
    Wrong(
        "ring_all_reduce",
        replace={"chunks =…": BY_HAND.replace(STARTED, BY_TURNS)},
        says="on 6 ranks 20 messages travel one after another, expected 10",
    ),
    Wrong("ring_all_reduce", replace={COUNT: "dist.get_world_size()"}, says="ranks 0 and 2"),
    Wrong(
        "ring_all_reduce",
        replace={"chunks =…": "dist.all_reduce(tensor)"},
        says="from rank 0: 0 of them, expected 6",
    ),
]
test_right, test_wrong = edited(build, [*SCATTER, *GATHER, *RING])
