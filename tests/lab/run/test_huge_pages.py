"""Pages are joined where the system can, nothing in them changes, and the server does it."""

import ctypes
import mmap
import sys
import time
from pathlib import Path

import pytest

from mgpu_tutorial.lab import borrowed, launch
from mgpu_tutorial.lab.run import huge_pages
from tests.lab import ranks

SIZE = huge_pages.SIZE
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux joins pages")


@pytest.fixture
def memory():
    """Four blocks in small pages, full of numbers; and their addresses."""
    with mmap.mmap(-1, 5 * SIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        memory.write(bytes(range(256)) * (5 * SIZE // 256))
        memory.madvise(mmap.MADV_HUGEPAGE)
        first = ctypes.c_char.from_buffer(memory)
        begin = -(-ctypes.addressof(first) // SIZE) * SIZE
        del first
        yield memory, [begin + n * SIZE for n in range(4)]


def huge(pid):
    """Bytes of a process in huge pages."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8")
    return int(text.split("AnonHugePages:")[1].split()[0]) * 1024


def huge_around(address):
    """Bytes in huge pages of that mapping of ours in which an address lies."""
    here = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, *words = line.split()
        if not name.endswith(":"):
            begin, end = (int(number, 16) for number in name.split("-"))
            here = begin <= address < end
        elif here and name == "AnonHugePages:":
            return int(words[0]) * 1024
    return 0


def require_joining(blocks):
    if not next(huge_pages.joining(blocks[:1])):
        pytest.skip("this system joins no pages")


def test_blocks_are_those_that_this_process_may_write(memory):
    blocks = huge_pages.own_blocks()
    assert set(memory[1]) <= set(blocks)
    assert all(block % SIZE == 0 for block in blocks) and len(set(blocks)) == len(blocks)


def test_joined_pages_hold_what_they_held(memory):
    memory, blocks = memory
    require_joining(blocks)
    assert list(huge_pages.joining(blocks[1:])) == [True] * 3
    assert huge_around(blocks[0]) >= 4 * SIZE
    assert memory[:] == bytes(range(256)) * (5 * SIZE // 256)


def test_work_is_done_in_bites(memory, monkeypatch):
    monkeypatch.setattr(huge_pages, "own_blocks", lambda: memory[1])
    joiner = huge_pages.Joiner()
    assert [joiner.work(0) for _ in range(5)] == [True] * 4 + [False]
    assert not huge_pages.Joiner().work(60)


def test_a_block_that_is_gone_does_no_harm(memory):
    assert list(huge_pages.joining([SIZE])) == [False]


def test_elsewhere_there_is_nothing_to_do(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not huge_pages.Joiner().work(60)


def test_the_fork_server_joins_its_pages_and_ranks_are_born_as_before(memory):
    require_joining(memory[1])
    assert launch(ranks.total, 2).results == [1.0, 1.0]
    end = time.monotonic() + 30
    while huge(borrowed.fork_server_pid()) < 2**26 and time.monotonic() < end:
        time.sleep(0.1)
    assert huge(borrowed.fork_server_pid()) >= 2**26
    assert launch(ranks.total, 2).results == [1.0, 1.0]
