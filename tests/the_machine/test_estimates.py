"""The ten estimates at the end of the chapter, each from the machine's own numbers."""

import re

import pytest

from mgpu_tutorial.instruments.price.machine import machine_of
from mgpu_tutorial.shared.cost_model.links import (
    Link,
    flat_ring_seconds,
    hierarchical_seconds,
    ring_seconds,
)
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS
from mgpu_tutorial.the_machine import plain
from tests.the_machine.test_one_machine import cells

H100 = machine_of("8 x H100")
F, M = H100.flops, H100.memory_rate
INSIDE, BETWEEN = (Link(0.0, link.bandwidth) for link in (H100.inside, H100.between))
P = 8.03e9  # the parameters of Llama 3 8B
RIDGE = F / M  # operations per byte
NODES = 16, 8, INSIDE, BETWEEN
TENSOR = 16 * 2**30 / 8  # of 16 GiB what a GPU has to pass on between two nodes
WORKED = {
    1: [f"{2e3 * 8192**3 / F:.2f} ms"],
    2: [f"{3 * RIDGE:.0f}"],
    3: [f"{1e3 * 14 * P / M:.0f} ms"],
    4: [f"{RIDGE:.0f}"],
    5: [f"{1e3 * ring_seconds(2 * P, 8, INSIDE):.0f} ms"],
    6: [
        f"{1e3 * flat_ring_seconds(2 * P, *NODES):.0f} ms",
        f"{1e3 * hierarchical_seconds(2 * P, *NODES):.0f} ms",
    ],
    7: [
        f"{plain.tokens_to_hide(0.6 * 2250e12, 0.7 * 900e9, 8):,.0f}",
        f"{plain.tokens_to_hide(0.6 * 2250e12, 8 * 0.7 * 50e9, 128):,.0f}",
    ],
    8: [f"{TENSOR / 0.066 / 1e9:.1f} GB/s"],
    9: [f"{CLUSTERS['H100'].gpu.memory / 16 / 1e9:.0f} billion", "two"],
    10: ["eight"],
}


@pytest.mark.parametrize("number, answers", WORKED.items())
def test_an_estimate_is_what_its_line_gives(number, answers):
    text = cells("the_machine")["end"]
    asked = re.split(r"^\*\*\d+\.\*\* ", text, flags=re.MULTILINE)[number]
    assert re.findall(r"\*\*(.+?)\*\*", asked) == answers


def test_the_rates_that_are_given_are_the_machine_s():
    text = cells("the_machine")["end"]
    for rate in (f"{F / 1e12:.0f} TFLOP/s", f"{M / 1e9:,.0f} GB/s of memory"):
        assert rate.replace("2,848", "2,850") in text
    assert f"{H100.inside.bandwidth / 1e9:.0f} GB/s by NVLink and 35 by a NIC" in text
    assert round(16e6 / 8192 / 1000) == 2 and round(16_384 / 2000) == 8
    assert -(-16 * P // 80e9) == 2
