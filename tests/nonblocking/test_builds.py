"""`work_meanwhile` takes right answers in other words; the others hear what they did."""

from mgpu_tutorial.nonblocking.builds import build
from tests.builds import right_and_wrong

WHO = "rank = dist.get_rank()"
START = "if rank == 0:", "    t = dist.isend(buffer, dst=1)"
START += "else:", "    t = dist.irecv(buffer, src=0)"
DROP = [line.replace("t = ", "") for line in START]
WORK, WAIT, RETURN = "done = work()", "t.wait()", "return done"


def work_meanwhile(*lines):
    head = "import torch.distributed as dist\n\n\ndef work_meanwhile(buffer, work):"
    return "\n    ".join([head, *lines])


RIGHT = [
    work_meanwhile(WHO, *START, WORK, WAIT, RETURN),
    work_meanwhile(
        WHO,
        "start, other = (dist.isend, 1) if rank == 0 else (dist.irecv, 0)",
        "transfer = start(buffer, other)",
        "try:",
        "    return work()",
        "finally:",
        "    transfer.wait()",
    ),
    work_meanwhile(
        WHO,
        "call = dist.irecv if rank else dist.isend",
        "works = dist.batch_isend_irecv([dist.P2POp(call, buffer, 1 - rank)])",
        WORK,
        "[w.wait() for w in works]",
        RETURN,
    ),
]
BLOCKING = "if rank == 0:", "    dist.send(buffer, dst=1)"
RECEIVE = "if rank == 1:", "    dist.recv(buffer, src=0)"
WRONG = {
    work_meanwhile("...", RETURN): "a `...` is left to fill in",
    work_meanwhile(WHO, *BLOCKING, WORK, *RECEIVE, RETURN): "rank 0 waits in send for rank 1",
    work_meanwhile(WHO, *BLOCKING, *RECEIVE, WORK, RETURN): "rank 0 called send, then work",
    work_meanwhile(WHO, *START, WAIT, WORK, RETURN): "called isend, then wait, then work",
    work_meanwhile(WHO, WORK, *START, WAIT, RETURN): "called work, then isend, then wait",
    work_meanwhile(WHO, *START, WORK, RETURN): "called isend, then work, and that is all",
    work_meanwhile(WHO, *DROP, WORK, RETURN): "called isend, then work, and that is all",
    work_meanwhile(WHO, *START, WAIT, "done = 1", RETURN): "rank 0 never called work",
    work_meanwhile(WHO, *START, WORK, WAIT): "Is a `return` missing?",
}


test_right, test_wrong = right_and_wrong(build, RIGHT, WRONG.items())
