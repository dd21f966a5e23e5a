"""What can happen to a process at any moment: SIGKILL, no last words."""

import itertools
import os
import signal
import sys
from types import FrameType
from typing import Any


def die_once() -> None:
    """In its first life under torchrun this process kills itself."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def die_at_call(number: int) -> None:
    """This process kills itself at its next call number `number`, in Python or in C."""
    calls = itertools.count(1)

    def count(frame: FrameType, event: str, function: Any) -> None:
        if event in ("call", "c_call") and next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
