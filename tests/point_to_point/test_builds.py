"""`swap` takes right answers in other words, and says what is wrong with the others."""

from mgpu_tutorial.point_to_point.builds import build
from tests.builds import right_and_wrong

SEND, RECV = "dist.send(mine, dst=peer)", "dist.recv(other, src=peer)"
EMPTY = "other = torch.empty_like(mine)"


def swap(*lines):
    head = "import torch\nimport torch.distributed as dist\n\n\ndef swap(mine, peer):"
    return "\n    ".join([head, *lines])


def in_order(condition, result="return other", buffer=EMPTY):
    first, second = [f"    {SEND}", f"    {RECV}"], [f"    {RECV}", f"    {SEND}"]
    return swap(buffer, f"if {condition}:", *first, "else:", *second, result)


RIGHT = [
    in_order("dist.get_rank() < peer"),
    in_order("peer < dist.get_rank()", buffer="other = torch.zeros_like(mine)"),
    swap(EMPTY, "sending = dist.isend(mine, peer)", RECV, "sending.wait()", "return other"),
    swap(
        EMPTY,
        "send, receive = dist.P2POp(dist.isend, mine, peer), "
        "dist.P2POp(dist.irecv, other, peer)",
        "for work in dist.batch_isend_irecv([send, receive]):",
        "    work.wait()",
        "return other",
    ),
]
WRONG = {
    swap(EMPTY, "...", "return other"): "a `...` is left to fill in",
    swap(EMPTY, SEND, RECV, "return other"): "deadlock: 0 → 1 → 0",
    swap(EMPTY, RECV, SEND, "return other"): "rank 0 waits in recv for rank 1",
    in_order("dist.get_rank() < peer", result=""): "Is a `return` missing?",
    in_order("dist.get_rank() < peer", result="return mine"): "receives: [0]",
    in_order("dist.get_rank() % 2 == 0"): "deadlock: 0 → 2 → 0",
    in_order("dist.get_rank() < peer", buffer="other = torch.zeros(1)"): "SIGABRT",
    in_order("dist.get_rank() < peer", buffer="other = mine"): "rank 0 of 2 receives",
    in_order(
        "dist.get_rank() < peer", "mine.copy_(other)\n    return mine"
    ): "after it, rank 0's own tensor is: [1]",
}


test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG.items())
