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
NEXT = "peer = (dist.get_rank() + dist.get_world_size() // 2) % dist.get_world_size()"
SWAP = [
    ("dist.get_rank() < peer", "peer < dist.get_rank()", "empty_like", "zeros_like"),
    ("if dist…", STARTED),
    ("if dist…", BATCH),
    ("if dist…", f"{SEND}\n    {RECV}\n    return other", "deadlock: 0 → 1 → 0"),
    ("< peer", "% 2 == 0", "deadlock: 0 → 2 → 0"),
    (RETURN, "", "Is a `return` missing?"),
    (RETURN, "return mine if dist.get_rank() else other", "rank 1 of 2 receives: [1]"),
    (RETURN, "return mine.copy_(other)", "after it, rank 0's own tensor is: [1]"),
    ("torch.empty_like(mine)", "torch.zeros(1)", "SIGABRT"),
    ("torch.empty_like(mine)", "torch.empty(mine.shape)", "SIGABRT"),
    ("other = torch", f"{NEXT}\n    other = torch", "rank 0 of 4 receives"),
    ("torch.empty_like(mine)", "mine", "rank 0 of 2 receives"),
]
test_right, test_wrong = edited(build, {"swap": SWAP})
