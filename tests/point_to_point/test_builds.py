"""`swap` takes right answers in other words, and says what is wrong with the others."""

from mgpu_tutorial.point_to_point.builds import build
from tests.builds import Right, Wrong, edited

SEND, RECV, RETURN = "dist.send(mine, peer)", "dist.recv(other, peer)", "return other"
STARTED = f"""work = dist.isend(mine, peer)
    {RECV}
    work.wait()
    return other"""
BATCH = """every = [dist.P2POp(dist.isend, mine, peer), dist.P2POp(dist.irecv, other, peer)]
    [work.wait() for work in dist.batch_isend_irecv(every)]
    return other"""
GATHERED = """every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return every[peer]"""
BY_ROWS = """for i in range(len(mine)):
        if dist.get_rank() < peer:
            dist.send(mine[i : i + 1], peer)
            dist.recv(other[i : i + 1], peer)
        else:
            dist.recv(other[i : i + 1], peer)
            dist.send(mine[i : i + 1], peer)
    return other"""
NEXT = "peer = (dist.get_rank() + dist.get_world_size() // 2) % dist.get_world_size()"
SWAP = [
    Right(
        "swap",
        replace={
            "dist.get_rank() < peer": "peer < dist.get_rank()",
            "empty_like": "zeros_like",
        },
    ),
    Right("swap", replace={"if dist…": STARTED}),
    Right("swap", replace={"if dist…": BATCH}),
    Wrong(
        "swap",
        replace={"if dist…": f"{SEND}\n    {RECV}\n    return other"},
        says="deadlock: 0 → 1 → 0",
    ),
    Wrong("swap", replace={"< peer": "% 2 == 0"}, says="deadlock: 0 → 2 → 0"),
    Wrong(
        "swap",
        replace={"if dist…": f"dist.isend(mine, peer)\n    {RECV}\n    {RETURN}"},
        says="never waited for the isend at",
    ),
    Wrong(
        "swap",
        replace={RETURN: "return other.tolist()"},
        says="rank 0 of 2 returns [1.0], which is no tensor",
    ),
    Wrong(
        "swap",
        replace={"dist.recv(other, src=peer)": "other = dist.recv(other, src=peer)"},
        says="returns who sent",
    ),
    Wrong(
        "swap",
        replace={"if dist…": "return mine - dist.get_rank() + peer"},
        says="whose peer is 2: no message",
    ),
    Wrong("swap", replace={"if dist…": GATHERED}, says="whose peer is 2: all_gather"),
    Wrong(
        "swap",
        replace={RETURN: f"extra = dist.isend(mine, peer)\n    {RETURN}"},
        says="recv from rank 2, then isend to rank 2",
    ),
    Wrong(
        "swap",
        replace={"if dist…": BY_ROWS},
        says="send to rank 2, then recv from rank 2, then send",
    ),
    Wrong(
        "swap",
        replace={"empty_like(mine)": "empty(len(mine), *mine.shape[1:], dtype=mine.dtype)"},
        says="len() of a 0-d tensor",
    ),
    Wrong("swap", replace={RETURN: ""}, says="Is a `return` missing?"),
    Wrong(
        "swap",
        replace={RETURN: "return mine if dist.get_rank() else other"},
        says="rank 1 of 2 receives: [1]",
    ),
    Wrong(
        "swap",
        replace={RETURN: "return mine.copy_(other)"},
        says="after it, rank 0's own tensor is: [1]",
    ),
    Wrong(
        "swap", replace={"torch.empty_like(mine)": "torch.zeros(1)"}, says="bytes came where"
    ),
    Wrong(
        "swap",
        replace={"torch.empty_like(mine)": "torch.empty(mine.shape)"},
        says="bytes came where",
    ),
    Wrong(
        "swap",
        replace={"other = torch": f"{NEXT}\n    other = torch"},
        says="rank 0 of 4 receives",
    ),
    Wrong("swap", replace={"torch.empty_like(mine)": "mine"}, says="rank 0 of 2 receives"),
]
test_right, test_wrong = edited(build, SWAP)
