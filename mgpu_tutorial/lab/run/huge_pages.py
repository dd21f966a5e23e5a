"""Memory of the fork server in huge pages, so that a rank is forked and ended sooner.

A fork copies a table with an entry for each page, and the end of a process walks through it
again. The imports of torch fill a quarter of a gigabyte: 60 000 pages of 4 kB, or 120 of
2 MB. Linux (6.1 and later) joins pages when it is asked to, and splits what a rank
writes to; elsewhere nothing happens. https://docs.kernel.org/admin-guide/mm/transhuge.html
"""

import ctypes
import sys
import time
from collections.abc import Iterator

SIZE = 2**21  # bytes, on x86-64, and on arm64 with pages of 4 kB
JOIN = 25  # MADV_COLLAPSE: linux/mman.h


def own_blocks() -> list[int]:
    """The addresses of the blocks of SIZE bytes that this process has allocated itself.

    What belongs to a file or to a stack is left alone.
    """
    blocks = []
    with open("/proc/self/maps", encoding="utf-8") as lines:
        for line in lines:
            addresses, rights, _, _, inode, *name = line.split()
            if rights != "rw-p" or inode != "0" or "stack" in "".join(name):
                continue
            begin, end = (int(address, 16) for address in addresses.split("-"))
            blocks += range(-(-begin // SIZE) * SIZE, end - SIZE + 1, SIZE)
    return blocks


def joining(blocks: list[int]) -> Iterator[bool]:
    """Join the pages of one block after the other; yields whether it could be done."""
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for block in blocks:
        yield advise(block, SIZE, JOIN) == 0


class Joiner:
    """Joins the pages that this process has at its first `work`, a little at each call."""

    def __init__(self):
        self._rest: Iterator[bool] = iter([])
        if sys.platform == "linux":
            self._rest = joining(own_blocks())

    def work(self, seconds: float) -> bool:
        """Go on for about so long; returns whether something is left to do."""
        end = time.monotonic() + seconds
        return any(time.monotonic() > end for _ in self._rest)
