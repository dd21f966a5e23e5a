"""One machine for the whole course: what chapters say of it follows from `machines.py`."""

from pathlib import Path

import nbformat
import pytest

from mgpu_tutorial.instruments.price.machine import machine_of
from mgpu_tutorial.shared.cost_model.links import Link, all_gather_seconds
from mgpu_tutorial.shared.cost_model.machines import HOST_4, HOST_5

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
H100 = machine_of("8 x H100")


def cells(stem):
    (path,) = NOTEBOOKS.glob(f"[0-9][0-9]_{stem}.ipynb")
    return {cell.id: cell.source for cell in nbformat.read(path, as_version=4).cells}


def test_host_and_links_are_the_parts_of_paper_that_04_says():
    for share in (HOST_4 / 32e9, HOST_5 / 64e9):
        assert share == pytest.approx(0.8, abs=0.03)
    text = cells("the_machine")["roads-between"]
    assert "50 GB/s over an H100's PCIe 5, and 25 of the 32" in text
    assert H100.inside.bandwidth == pytest.approx(315e9)
    assert H100.between.bandwidth == pytest.approx(35e9)
    assert H100.flops == pytest.approx(657e12, rel=1e-3)


def test_copies_to_the_host_take_the_rate_of_04():
    assert f"{HOST_5 / 1e9:.0f} GB/s of an H100's PCIe 5" in cells("survival")["23"]
    assert f'"PCIe 5", {HOST_5 / 1e9:.0f}e9, ' in cells("fully_shard")["43"]
    seconds = 6 * 7e9 * 8192 / H100.flops
    assert f"= {seconds:.2f} s. By PCIe" in cells("fully_shard")["44"]
    copies = 12 * 7e9 / 8 / HOST_5, 28 * 7e9 / 8 / HOST_5  # the link, and Adam on the CPU
    assert copies[0] < seconds < seconds + copies[1] < 2 * seconds


def test_the_decision_of_20_is_that_of_its_numbers():
    found, width, tokens = cells("tensor_parallel_in_practice"), 8192, 8192
    parameters = 12 * width**2 / 8
    compute = 6 * parameters * tokens / H100.flops
    tensor = 8 * tokens * width * 7 / 8 * 2
    shards = 3 * 63 / 64 * parameters * 2
    assert f"**{1e3 * compute:.1f} ms**" in found["40"]
    inside, between = H100.inside.bandwidth, H100.between.bandwidth
    assert f"for link in ({inside / 1e9:.0f}, {between / 1e9:.0f}, 3):" in found["41"]
    assert f"adds {1e3 * tensor / inside:.0f} ms to {1e3 * compute:.1f}" in found["42"]
    assert 3.5 < tensor / between / compute < 4  # nearly four times
    late = shards / between
    assert f"{1e3 * late:.1f} ms behind {1e3 * compute:.1f}" in found["42"]
    assert f"{late / compute:.1f} times as many tokens, some 18,500" in found["42"]
    assert tokens * late / compute == pytest.approx(18_500, rel=0.003)


def test_the_attention_of_21_is_seven_products():
    found = cells("long_sequences")
    short, long = (
        8 * 7 * s**2 * 4096 / gpus / H100.flops for s, gpus in ((8192, 1), (65_536, 8))
    )
    assert f"About {1e3 * short:.0f} ms went" in found["0e6b3829"]
    assert f"{1e3 * long:.0f} ms instead of {1e3 * short:.0f}" in found["927075ad"]


def test_a_gigabyte_of_27_takes_28_6_ms():
    node, link = 8, Link(0, 0.7 * 50e9 / 8)  # a card of 50 Gb/s
    whole = 1e9 * 64 / 63  # of which a rank sends one GB
    seconds = all_gather_seconds(whole, 64, node, Link(0, 315e9), link)
    text = cells("challenges")["babe6355"]
    assert f"takes {1e3 * seconds:.1f} ms" in text
