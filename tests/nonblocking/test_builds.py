"""`work_meanwhile` takes right answers in other words; the others hear what they did."""

from mgpu_tutorial.nonblocking.builds import build
from tests.builds import Right, Wrong, edited

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
    Right("work_meanwhile", replace={"done =…": FINALLY}),
    Right("work_meanwhile", replace={"if dist…": BATCH}),
    Wrong(
        "work_meanwhile",
        replace={"if dist…": BLOCKING},
        says="rank 0 waits in send for rank 1",
    ),
    Wrong(
        "work_meanwhile",
        replace={"dist.isend(buffer, dst=1)": "dist.isend(buffer, 0)"},
        says="rank 0 raised RuntimeError: Pair is not connected: this rank sends to itself",
    ),
    Wrong(
        "work_meanwhile",
        replace={"isend": "send", "irecv": "recv", WAIT: ""},
        says="rank 0 called send, then work: it stood still before",
    ),
    Wrong(
        "work_meanwhile",
        replace={WAIT: f"if dist.get_rank() == 0:\n        {WAIT}"},
        says="rank 1 called irecv, then work: its transfer may not be over",
    ),
    Wrong(
        "work_meanwhile",
        replace={DO: f"{DO}; {DO}"},
        says="then work, then work, then wait: work must run once, and ran 2",
    ),
    Wrong(
        "work_meanwhile", replace={"(buffer,": "(buffer[:1],"}, says="rank 1's buffer: [7, 0"
    ),
    Wrong(
        "work_meanwhile",
        replace={WAIT: "", DO: f"{WAIT}; {DO}"},
        says="called isend, then wait, then work: it stood still",
    ),
    Wrong(
        "work_meanwhile",
        replace={DO: "", "if dist": f"{DO}\n    if dist"},
        says="called work, then isend, then wait: it worked before",
    ),
    Wrong(
        "work_meanwhile",
        replace={WAIT: ""},
        says="called isend, then work: its transfer may not be over",
    ),
    Wrong(
        "work_meanwhile", replace={"return done": "return transfer"}, says="Work object at"
    ),
    Wrong(
        "work_meanwhile",
        replace={"work()": "work"},
        says="rank 0 called isend, then wait: work must run once, and ran 0",
    ),
    Wrong("work_meanwhile", replace={"return done": ""}, says="Is a `return` missing?"),
]
test_right, test_wrong = edited(build, WORK_MEANWHILE)
