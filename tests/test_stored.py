"""The stored times show what their pages say.

A run on a busy machine passes in its notebook, or asks to be run again. What is stored is
read by everybody who does not run it: it must show the lesson, and two chapters the same
machine.
"""

import re
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def stored(stem, cell):
    """What is stored below one cell, as text."""
    (path,) = NOTEBOOKS.glob(f"[0-9]*_{stem}.ipynb")
    (found,) = (each for each in nbformat.read(path, 4).cells if each.id == cell)
    data = [each.get("data", {}).get("text/plain", "") for each in found.outputs]
    return "\n".join([each.get("text", "") for each in found.outputs] + data)


def row(stem, cell, name):
    """The numbers of one row of a stored table."""
    (line,) = re.findall(rf"^ *{re.escape(name)} +(.*)$", stored(stem, cell), re.MULTILINE)
    return [float(each.strip("%")) for each in line.replace(",", "").split()]


def test_03_and_04_have_met_the_same_machine():
    ring, *_ = row("collectives", "39", "4,000")
    latency = re.search(r"([\d.]+) µs", stored("the_machine", "ring-there"))[1]
    assert 1 / 2 < 6 * float(latency) / 1e3 / ring < 2


def test_03s_ring_is_the_faster_one_for_much_and_the_slower_one_for_little():
    (ring, naive, _), (large_ring, large_naive, _) = (
        row("collectives", "39", size) for size in ("4,000", "20,000,000")
    )
    assert ring > naive
    assert large_ring < large_naive


def test_02_computes_while_it_sends():
    in_turn, together = re.findall(r"([\d.]+) s", stored("nonblocking", "27"))
    assert float(together) < 0.75 * float(in_turn)


def test_08s_buckets_end_before_the_smallest_and_the_largest():
    ends = {
        name: row("ddp_buckets", "24", name)[-1]
        for name in ("naive", "cap 0", "cap 25", "cap 0.25", "PyTorch's DDP")
    }
    assert max(ends["cap 0.25"], ends["PyTorch's DDP"]) < 0.95 * min(
        ends["cap 0"], ends["cap 25"]
    )
    assert ends["naive"] == max(ends.values())


@pytest.mark.parametrize("name", ["naive", "cap 0", "cap 25", "cap 0.25", "PyTorch's DDP"])
def test_08s_measured_times_are_near_the_computed_ones(name):
    _, computed, measured = row("ddp_buckets", "24", name)
    assert computed < measured < 1.4 * computed


def test_10s_last_rank_waits_for_nobody():
    first, last = (row("ddp_in_practice", "35", f"rank {rank}") for rank in (0, 1))
    assert 70 < first[1] - last[1] < 130  # rank 1 comes 100 ms late
    assert first[3] > 3 * last[3]
    assert first[4] < last[4]
