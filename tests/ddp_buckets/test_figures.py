"""What is counted and computed."""

from dataclasses import replace

import pytest

from mgpu_tutorial.ddp_buckets import figures
from mgpu_tutorial.ddp_buckets.experiments import Setting
from mgpu_tutorial.shared.cost_model.links import Link


def test_the_model_computes_when_each_step_ends():
    """Three layers of 4 s, 8 bytes each, and a head of 40 + 40; a byte takes 0.05 s."""
    link = Link(latency=0.5, bandwidth=20.0)  # two ranks: a second a call, and S / 20
    setting = Setting(width=1, depth=3, pause=4.0, link=link)
    layer, head = [4, 4], [40, 40]
    naive = 12 + 8 + (3 * sum(layer) + sum(head)) / 20
    # the layers' calls keep up; the head comes last, with two calls
    early = 12 + 4 + (sum(layer) + sum(head)) / 20
    single = 12 + 1 + (3 * sum(layer) + sum(head)) / 20
    head_last = 12 + 2 + (sum(layer) + sum(head)) / 20
    head_first = 12 + 1 + sum(layer) / 20
    ends = [naive, early, single, head_last, head_first]
    assert figures.computed_milliseconds(setting) == pytest.approx([1e3 * e for e in ends])
    # a link that does not keep up is busy from the first call on
    slow = figures.computed_milliseconds(replace(setting, link=Link(2.5, 20.0)))
    assert slow[1] == pytest.approx(1e3 * (4 + 8 * 5 + 5.2))
