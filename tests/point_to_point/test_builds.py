"""`swap` takes right answers in other words, and says what is wrong with the others."""

from mgpu_tutorial.point_to_point.builds import build
from tests.builds import edited

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
NEXT = "peer = (dist.get_rank() + dist.get_world_size() // 2) % dist.get_world_size()"
SWAP = [
    ("dist.get_rank() < peer", "peer < dist.get_rank()", "empty_like", "zeros_like"),
    ("if dist…", STARTED),
    ("if dist…", BATCH),
    ("if dist…", f"{SEND}\n    {RECV}\n    return other", "deadlock: 0 → 1 → 0"),
    ("< peer", "% 2 == 0", "deadlock: 0 → 2 → 0"),
    (
        "if dist…",
        f"dist.isend(mine, peer)\n    {RECV}\n    {RETURN}",
        "never waited for the isend at",
    ),
    (RETURN, "return other.tolist()", "rank 0 of 2 returns [1.0], which is no tensor"),
    ("dist.recv(other, src=peer)", "other = dist.recv(other, src=peer)", "returns who sent"),
    ("if dist…", "return mine - dist.get_rank() + peer", "whose peer is 2: no message"),
    ("if dist…", GATHERED, "whose peer is 2: all_gather"),
    (
        RETURN,
        f"extra = dist.isend(mine, peer)\n    {RETURN}",
        "recv from rank 2, then isend to rank 2",
    ),
    (RETURN, "", "Is a `return` missing?"),
    (RETURN, "return mine if dist.get_rank() else other", "rank 1 of 2 receives: [1]"),
    (RETURN, "return mine.copy_(other)", "after it, rank 0's own tensor is: [1]"),
    ("torch.empty_like(mine)", "torch.zeros(1)", "SIGABRT"),
    ("torch.empty_like(mine)", "torch.empty(mine.shape)", "SIGABRT"),
    ("other = torch", f"{NEXT}\n    other = torch", "rank 0 of 4 receives"),
    ("torch.empty_like(mine)", "mine", "rank 0 of 2 receives"),
]
test_right, test_wrong = edited(build, {"swap": SWAP})
