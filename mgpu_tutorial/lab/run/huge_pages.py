"""Memory of the fork server in huge pages, so that a rank is forked and ended sooner.

A fork copies a table with an entry for each page, and the end of a process walks through it
again. The imports of torch fill a quarter of a gigabyte: 60 000 pages of 4 kB, or 120 of
2 MB. Linux (6.1 and later) joins pages when it is asked to, and splits what a rank
writes to; where it cannot, or its administrator has switched huge pages off, nothing
happens. https://docs.kernel.org/admin-guide/mm/transhuge.html
"""

import ctypes
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

SIZE = 2**21  # bytes, on x86-64, and on arm64 with pages of 4 kB
JOIN = 25  # MADV_COLLAPSE: linux/mman.h
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def own_blocks() -> list[int]:
    """The addresses of the blocks of SIZE bytes in this process's memory that is no file's.

    Raises OSError or ValueError where the system does not say it as Linux does.
    """
    blocks = []
    text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        addresses, rights, _, _, inode, *name = line.split()
        if rights != "rw-p" or inode != "0" or name == ["[stack]"]:
            continue
        begin, end = (int(address, 16) for address in addresses.split("-"))
        blocks += range(-(-begin // SIZE) * SIZE, end - SIZE + 1, SIZE)
    return blocks


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


def join(block: int) -> bool:
    """Join the pages of the block at this address; whether it could be done."""
    return _libc().madvise(ctypes.c_void_p(block), ctypes.c_size_t(SIZE), JOIN) == 0


class Joiner:
    """Joins the pages that this process has when it is made, some at each `work`.

    A handler of signals may call `work` while another call of it is under way.
    """

    def __init__(self):
        self._left: Iterator[int] = iter([])
        if sys.platform != "linux":
            return
        with suppress(OSError, ValueError):
            if "[never]" not in SWITCH.read_text(encoding="utf-8"):
                _libc()
                self._left = iter(own_blocks())

    def work(self, seconds: float) -> None:
        """Go on for about so long."""
        end = time.monotonic() + seconds
        while time.monotonic() < end and (block := next(self._left, None)) is not None:
            join(block)
