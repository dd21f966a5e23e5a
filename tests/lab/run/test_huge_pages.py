"""Pages are joined where the system can, nothing in them changes, and the server does it."""

import ctypes
import mmap
import sys
import time
from contextlib import suppress
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
        with suppress(OSError):  # a system without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
        memory.write(bytes(range(256)) * (5 * SIZE // 256))
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        first = ctypes.c_char.from_buffer(memory)
        begin = -(-ctypes.addressof(first) // SIZE) * SIZE
        del first
        yield memory, [begin + n * SIZE for n in range(4)]


@pytest.fixture
def switch(tmp_path, monkeypatch):
    """The file in which the administrator says who gets huge pages."""
    file = tmp_path / "enabled"
    file.write_text("always [madvise] never\n")
    monkeypatch.setattr(huge_pages, "SWITCH", file)
    return file


@pytest.fixture
def joined(monkeypatch):
    """The blocks that are joined, in order; nothing happens to them."""
    blocks = []
    monkeypatch.setattr(huge_pages, "join", blocks.append)
    return blocks


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
    if not all(map(huge_pages.join, blocks)):
        pytest.skip("this system joins no pages")


def test_blocks_are_those_of_no_file_and_no_stack(memory):
    blocks = huge_pages.own_blocks()
    assert set(memory[1]) <= set(blocks)
    assert all(block % SIZE == 0 for block in blocks) and len(set(blocks)) == len(blocks)


def test_joined_pages_hold_what_they_held(memory):
    memory, blocks = memory
    require_joining(blocks)
    assert huge_around(blocks[0]) >= 4 * SIZE
    assert memory[:] == bytes(range(256)) * (5 * SIZE // 256)


def test_what_is_no_memory_is_not_joined():
    assert not huge_pages.join(SIZE)


def test_work_stops_in_time_and_goes_on(switch, joined, monkeypatch):
    monkeypatch.setattr(huge_pages, "own_blocks", lambda: [1, 2, 3])
    joiner = huge_pages.Joiner()
    joiner.work(0)
    assert joined == []
    joiner.work(60)
    assert joined == [1, 2, 3]


def test_work_inside_work_does_each_block_once(switch, monkeypatch):
    """A signal may come while its handler is still at the last one."""
    monkeypatch.setattr(huge_pages, "own_blocks", lambda: [1, 2, 3])
    joiner, joined = huge_pages.Joiner(), []

    def join(block):
        joined.append(block)
        joiner.work(60)

    monkeypatch.setattr(huge_pages, "join", join)
    joiner.work(60)
    assert joined == [1, 2, 3]


def no_such_file():
    raise FileNotFoundError("/proc/self/maps")


def another_form():
    raise ValueError("not enough values to unpack")


@pytest.mark.parametrize("blocks", [no_such_file, another_form])
def test_a_system_that_does_not_say_its_blocks_is_left_as_it_is(
    switch, joined, monkeypatch, blocks
):
    monkeypatch.setattr(huge_pages, "own_blocks", blocks)
    huge_pages.Joiner().work(60)
    assert joined == []


@pytest.mark.parametrize("case", ["switched off", "no switch", "no Linux"])
def test_where_there_are_no_huge_pages_nothing_is_asked_for(
    switch, joined, monkeypatch, case
):
    if case == "switched off":
        switch.write_text("always madvise [never]\n")
    elif case == "no switch":
        switch.unlink()
    else:
        monkeypatch.setattr(sys, "platform", "darwin")
    huge_pages.Joiner().work(60)
    assert joined == []


def test_the_fork_server_joins_its_pages_and_ranks_are_born_as_before(memory):
    require_joining(memory[1])
    if "[never]" in huge_pages.SWITCH.read_text():
        pytest.skip("huge pages are switched off")
    assert launch(ranks.total, 2).results == [1.0, 1.0]
    end = time.monotonic() + 30
    while huge(borrowed.fork_server_pid()) < 2**24 and time.monotonic() < end:
        time.sleep(0.1)
    assert huge(borrowed.fork_server_pid()) >= 2**24
    assert launch(ranks.total, 2).results == [1.0, 1.0]
