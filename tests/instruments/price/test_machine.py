"""A machine of one's own, and the share that fits a step."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.instruments.price import fit, price
from mgpu_tutorial.instruments.price.machine import (
    call_seconds,
    machine_of,
    operation_seconds,
)
from mgpu_tutorial.instruments.price.tape import EXACT, HALF, TENSOR_FLOAT, Call, Operation
from mgpu_tutorial.lab import span
from mgpu_tutorial.shared.cost_model.machines import CLUSTERS, TAPED
from tests.instruments.price.test_tape import preloaded  # noqa: F401

PAGE = (Path(__file__).parents[3] / "docs" / "price.md").read_text("utf-8")
*_, WRITTEN = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
exec(WRITTEN, namespace := {})
GEFORCE = namespace["geforce"]


EVERYBODY = tuple(range(8))


def test_a_shared_link_is_divided_among_those_that_send():
    call = Call("all_reduce", 1e9, EVERYBODY)
    shared, alone = (call_seconds(call, 0, GEFORCE._replace(shared=n)) for n in (4, 1))
    latency = 14 * GEFORCE.inside.latency
    assert shared - latency == pytest.approx(4 * (alone - latency))
    pair = Call("send", 1e9, (0, 1), peer=1)
    of_two = call_seconds(pair, 0, GEFORCE.of(2))  # no others are there to share it
    assert of_two == pytest.approx(10e-6 + 2 * 1e9 / 25e9)


@pytest.mark.parametrize(
    ("machine", "numbers", "times"),
    [
        *((GEFORCE, numbers, n) for numbers, n in ((HALF, 1), (TENSOR_FLOAT, 2), (EXACT, 2))),
        ("8 x A100", EXACT, 16),
        ("8 x H100", EXACT, 989 / 67),
        ("8 x H100", TENSOR_FLOAT, 2),
    ],
)
def test_products_of_32_bits_have_a_pace_of_their_own(machine, numbers, times):
    machine = machine_of(machine)
    one = Operation("mm", 1e12, 0, numbers)
    expected = times * 1e12 / machine.flops
    assert operation_seconds(one, machine) == pytest.approx(expected)


def train(rank, world_size, tokens=4096):
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4)))
    for _ in range(2):
        with span("step"):
            model(torch.randn(tokens, 2048)).sum().backward()
            dist.all_reduce(model[0].weight.grad)


def test_a_fit_gives_the_seconds_that_were_measured():
    found = price(train, 8, machine=GEFORCE)
    measured = 1.3 * found.seconds
    machine = fit(found, measured)
    assert found.on(machine).seconds == pytest.approx(measured)
    assert machine.flops < GEFORCE.flops
    assert f"fitted to {1e3 * measured:.3g} ms" in repr(found.on(machine))


def test_seconds_that_no_share_gives_are_refused():
    found = price(train, 8, machine=GEFORCE)
    above = found.on(GEFORCE._replace(flops=1.2 * GEFORCE.peak)).seconds
    with pytest.raises(ValueError, match="120% of the peak of 8 x RTX 4090"):
        fit(found, above)
    with pytest.raises(ValueError, match="pass beside the products"):
        fit(found, found.seconds / 1e3)
    with pytest.raises(ValueError, match="measured step, got 0"):
        fit(found, 0)


def test_the_line_and_the_table_say_share_range_and_tokens():
    found = price(train, 8, machine="8 x A100")
    assert "products at 66% of the peak, published programs 64 to 69%" in repr(found)
    (row,) = found.table().rows
    assert row[-1] == f"{4096 / found.seconds:,.0f}"
    assert "a guess" in repr(found.on(GEFORCE)) and found.tokens == 4096
    own = found.on(GEFORCE._replace(peak=0.0))
    assert "products at 99 TFLOP/s" in repr(own)


def test_every_cluster_has_a_share_among_those_that_were_seen():
    assert TAPED.keys() == CLUSTERS.keys()
    for name, taped in TAPED.items():
        low, high = taped.seen
        assert low - 0.005 <= taped.share <= high + 0.005, name
        assert taped.exact < taped.tensor_float < CLUSTERS[name].gpu.peak


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"exact": 0.5}, "exact must be 1 or more"),
        ({"tensor_float": math.nan}, "tensor_float must be 1 or more"),
        ({"shared": 0}, "shared must be a whole number"),
        ({"peak": -1.0}, "peak must be 0 or more"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(changed, words):
    with pytest.raises(ValueError, match=words):
        machine_of(GEFORCE._replace(**changed))
