"""`work_meanwhile` takes right answers in other words; the others hear what they did."""

from mgpu_tutorial.nonblocking.builds import build
from tests.builds import edited

FINALLY = """try:
        return work()
    finally:
        transfer.wait()"""
BATCH = """rank = dist.get_rank()
    call = dist.irecv if rank else dist.isend
    works = dist.batch_isend_irecv([dist.P2POp(call, buffer, 1 - rank)])
    done = work()
    [w.wait() for w in works]
    return done"""
BLOCKING = """if dist.get_rank() == 0:
        dist.send(buffer, dst=1)
    done = work()
    if dist.get_rank() == 1:
        dist.recv(buffer, src=0)
    return done"""
DO, WAIT = "done = work()", "transfer.wait()"
WORK_MEANWHILE = [
    ("done =…", FINALLY),
    ("if dist…", BATCH),
    ("if dist…", BLOCKING, "rank 0 waits in send for rank 1"),
    (
        "isend",
        "send",
        "irecv",
        "recv",
        WAIT,
        "",
        "rank 0 called send, then work: it stood still before",
    ),
    (
        WAIT,
        f"if dist.get_rank() == 0:\n        {WAIT}",
        "rank 1 called irecv, then work: its transfer may not be over",
    ),
    (DO, f"{DO}; {DO}", "then work, then work, then wait: work must run once, and ran 2"),
    ("(buffer,", "(buffer[:1],", "rank 1's buffer: [7, 0"),
    (WAIT, "", DO, f"{WAIT}; {DO}", "called isend, then wait, then work: it stood still"),
    (
        DO,
        "",
        "if dist",
        f"{DO}\n    if dist",
        "called work, then isend, then wait: it worked before",
    ),
    (WAIT, "", "called isend, then work: its transfer may not be over"),
    ("return done", "return transfer", "Work object at"),
    ("work()", "work", "rank 0 called isend, then wait: work must run once, and ran 0"),
    ("return done", "", "Is a `return` missing?"),
]
test_right, test_wrong = edited(build, {"work_meanwhile": WORK_MEANWHILE})
