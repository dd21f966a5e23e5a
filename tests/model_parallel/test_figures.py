"""What a cut costs, against the ledger and arithmetic by hand."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from mgpu_tutorial.lab import Ledger, devices
from mgpu_tutorial.model_parallel import figures
from mgpu_tutorial.model_parallel.split_resnet import UNITS, ModelParallelResNet50
from tests.model_parallel.test_split_resnet import PLACES


@pytest.mark.slow
def test_units_add_up_to_the_network():
    measured, few = figures.measure(128, 64), figures.measure(8, 64)
    assert sum(unit.parameters for unit in measured.values()) == 25_557_032
    assert all(measured[name].flops == 16 * few[name].flops for name in UNITS)
    assert few["fc"].flops == 2 * 8 * 2048 * 1000
    assert few["conv1"].flops == 2 * 8 * 64 * 32 * 32 * 3 * 7 * 7


@pytest.mark.slow
def test_memory_predicted_from_shapes_is_what_the_ledger_counts():
    places, several = ["layer1.0", "layer4.1"], devices(3)
    model = ModelParallelResNet50(several, cuts=places)
    with Ledger().saved_for_backward(model) as ledger:
        model(torch.randn(4, 3, 40, 40).to(several[0]))
    predicted = figures.stage_costs(figures.measure(batch=4, image_size=40), places)
    for device, stage in zip(several, predicted, strict=True):
        assert ledger[device]["parameters"] == 4 * stage.parameters
        assert ledger[device]["activations"] == stage.activation_bytes


def some_units(parameters, flops, sides, saved):
    """Units with given numbers; neighbours save a storage of 5 bytes together."""
    columns = enumerate(zip(parameters, flops, sides, saved, strict=True))
    units = [
        figures.Unit(p, f, {i: kept, f"{i // 2} shared": 5}, 4 * side)
        for i, (p, f, side, kept) in columns
    ]
    return dict(zip(UNITS, units, strict=True))


TWENTY = some.lists(some.integers(1, 100), min_size=20, max_size=20)
MEASURED = some.builds(some_units, TWENTY, TWENTY, TWENTY, TWENTY)


@given(MEASURED, PLACES)
def test_a_stage_needs_what_its_units_need(measured, places):
    ends = [0, *(UNITS.index(name) for name in places), 20]
    stages = figures.stage_costs(measured, places)
    for stage, begin, end in zip(stages, ends[:-1], ends[1:], strict=True):
        units = list(measured.values())[begin:end]
        assert stage.parameters == sum(unit.parameters for unit in units)
        assert stage.flops == sum(unit.flops for unit in units)
        shared = {i // 2 for i in range(begin, end)}  # counted once in a stage
        own = sum(unit.saved[begin + i] for i, unit in enumerate(units))
        assert stage.activation_bytes == own + 5 * len(shared)
        assert stage.memory == 12 * stage.parameters + stage.activation_bytes
        assert stage.output_bytes == units[-1].output_bytes
    work = [stage.flops for stage in stages]
    assert figures.most_work(measured, places) == max(work) / sum(work)
