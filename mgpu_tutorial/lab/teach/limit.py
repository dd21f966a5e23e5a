"""An endless loop of a reader's function in the kernel is ended, and says where it was."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

LIMIT = 10.0  # seconds of work of its own
WAITING = 3  # times as many for what sleeps, or shares its processor with others
TICKS = 10  # looks in LIMIT


class NotReturned(BaseException):
    """The function was ended; no `except Exception` of the reader's keeps it alive."""


@contextmanager
def limited(except_in: Callable) -> Iterator[None]:
    """Raise NotReturned in what has worked here for LIMIT seconds.

    While `except_in` runs, which has a limit of its own, no second counts. Only the main
    thread of a program can be called away from its work; in others nothing is limited.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    began = time.monotonic()
    since = [began, time.thread_time()]

    def look(_: int, frame: FrameType | None) -> None:
        now = [time.monotonic(), time.thread_time()]
        if _is_in(except_in.__code__, frame):
            since[:] = now
        elif now[1] - since[1] >= LIMIT or now[0] - since[0] >= WAITING * LIMIT:
            raise NotReturned(f"it had not returned after {now[0] - since[0]:.0f} s")

    before = signal.signal(signal.SIGALRM, look)
    left, every = signal.setitimer(signal.ITIMER_REAL, LIMIT / TICKS, LIMIT / TICKS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
        if left:  # somebody else's alarm goes on
            rest = max(left - (time.monotonic() - began), 0.001)
            signal.setitimer(signal.ITIMER_REAL, rest, every)


def _is_in(code: CodeType, frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
