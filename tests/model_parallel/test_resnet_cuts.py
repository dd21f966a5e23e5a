"""Where ResNet-50 can be cut, against torchvision's network and arithmetic by hand."""

import pytest
import torch

from mgpu_tutorial.lab import Ledger, devices
from mgpu_tutorial.lab.words import bytes_text
from mgpu_tutorial.model_parallel import drawings, measurements
from mgpu_tutorial.model_parallel import resnet_cuts as cuts
from mgpu_tutorial.model_parallel import split_resnet as resnet
from mgpu_tutorial.shared.vision import torchvision
from tests.model_parallel.reference import SIDE


def sides(size):
    """Height and width behind conv1, the pooling and each layer, from the paper's strides."""
    return {
        64: (32, 16, 16, 8, 4, 2),
        75: (38, 19, 19, 10, 5, 3),
        224: (112, 56, 56, 28, 14, 7),
    }[size]


@pytest.mark.parametrize("size", [64, 75, 224])
def test_shapes_are_those_of_the_network(size):
    conv, pool, one, two, three, four = sides(size)
    shapes = [[2, 3, size, size], [2, 64, conv, conv], [2, 64, pool, pool]]
    shapes += 3 * [[2, 256, one, one]] + 4 * [[2, 512, two, two]]
    shapes += 6 * [[2, 1024, three, three]] + 3 * [[2, 2048, four, four]]
    shapes += [[2, 2048], [2, 1000]]
    assert measurements.stage_shapes(cuts.UNITS[1:], 2, size) == shapes
    before_the_tenth_block = [2, 1024, three, three]
    found = measurements.stage_shapes(["layer3.2"], 2, size)
    assert found == [shapes[0], before_the_tenth_block, [2, 1000]]


def test_units_are_where_torchvision_has_them(data, whole):
    """What each block really puts out, in the order of the forward."""
    seen = {}
    for name in cuts.UNITS:
        if name not in ("conv1", "avgpool"):  # these units end in another module
            module = whole.get_submodule(name)
            module.register_forward_hook(
                lambda _, __, output, name=name: seen.update({name: list(output.shape)})
            )
    whole(data[0])
    expected = {
        unit.name: unit.shape for unit in measurements.measure(4, SIDE) if unit.name in seen
    }
    assert list(seen) == list(expected) and seen == expected


def test_units_add_up_to_the_network(whole):
    measured = measurements.measure(128, 64)
    assert [unit.name for unit in measured] == list(cuts.UNITS)
    count = sum(parameter.numel() for parameter in whole.parameters())
    assert sum(unit.parameters for unit in measured) == count
    batch = measurements.measure(8, 64)
    assert all(a.flops == 16 * b.flops for a, b in zip(measured, batch, strict=True))
    by_name = {unit.name: unit for unit in batch}
    assert by_name["fc"].flops == 2 * 8 * 2048 * 1000
    assert by_name["conv1"].flops == 2 * 8 * 64 * 32 * 32 * 3 * 7 * 7


@pytest.mark.parametrize("places", [["layer3.0"], ["layer1.0", "layer4.1"], ["fc"]])
def test_memory_predicted_from_shapes_is_what_the_ledger_counts(data, weights, places):
    several = devices(len(places) + 1)
    with torch.device("meta"):
        model = resnet.ModelParallelResNet50(several, cuts=places)
    model.load_state_dict(weights)
    with Ledger().saved_for_backward(model) as ledger:
        model(data[0].to(several[0]))
    predicted = measurements.stage_costs(
        measurements.measure(batch=4, image_size=SIDE), places
    )
    for device, stage in zip(several, predicted, strict=True):
        assert ledger[device]["parameters"] == 4 * stage.parameters
        assert ledger[device]["activations"] == stage.activation_bytes
        assert stage.memory == 12 * stage.parameters + stage.activation_bytes


@pytest.mark.parametrize(
    "place, sent",
    [
        ("maxpool", 8 * 64 * 32 * 32),
        ("layer2.0", 8 * 256 * 16 * 16),
        ("layer3.0", 8 * 512 * 8 * 8),
        ("avgpool", 8 * 2048 * 2 * 2),
        ("fc", 8 * 2048),
    ],
)
def test_the_bytes_over_a_cut_are_those_of_the_activations(place, sent):
    first, second = measurements.stage_costs(measurements.measure(8, 64), [place])
    assert (first.output_bytes, second.output_bytes) == (4 * sent, 4 * 8 * 1000)


def test_the_best_cuts_are_best():
    measured = measurements.measure(8, 64)
    pairs = {name: measurements.stage_costs(measured, [name]) for name in cuts.UNITS[1:]}

    def worst(value):
        return {name: max(map(value, pair)) for name, pair in pairs.items()}

    aims = {
        "memory": worst(lambda stage: 12 * stage.parameters + stage.activation_bytes),
        "balance": worst(lambda stage: stage.flops),
        "traffic": {name: first.output_bytes for name, (first, _) in pairs.items()},
    }
    best = measurements.best_cuts(measured)
    for aim, values in aims.items():
        assert values[best[aim]] == min(values.values()), aim
    assert len(set(best.values())) == 3
    rows = measurements.cut_table(measured).rows
    assert len(rows) == 19
    assert rows[0][5] == bytes_text(pairs["maxpool"][1].memory)
    assert rows[8][0] == "layer3.0" and rows[8][1:3] == ["1.4 M", "24.1 M"]


def test_the_busiest_stage_has_its_share_of_the_work():
    def unit(name, flops):
        return measurements.Unit(name, [1], 0, flops, {})

    measured = [unit(name, 1) for name in cuts.UNITS]
    assert measurements.most_work(measured, ["layer1.0", "layer4.0"]) == 13 / 20


def test_larger_batches_want_an_earlier_cut():
    small, large = (
        measurements.best_cuts(measurements.measure(batch, 64)) for batch in (8, 128)
    )
    assert cuts.UNITS.index(large["memory"]) < cuts.UNITS.index(small["memory"])
    assert large["balance"] == small["balance"]


def test_a_cut_is_drawn_with_its_numbers():
    plot = drawings.cut_picture(measurements.measure(8, 64), ["layer3.0"])
    assert repr(plot).splitlines() == [
        "cut before layer3.0",
        "device 0: 1.44 M parameters, 40.4 MiB of activations, 2.37 GFLOP, sends 1 MiB",
        "device 1: 24.11 M parameters, 14.4 MiB of activations, 3.00 GFLOP",
    ]
    assert plot.png.startswith(b"\x89PNG")
    assert plot.png == drawings.cut_picture(measurements.measure(8, 64), ["layer3.0"]).png
    assert plot.png != drawings.cut_picture(measurements.measure(8, 64), ["layer3.1"]).png
    with pytest.raises(ValueError, match="cuts must be a list"):
        drawings.cut_picture(measurements.measure(8, 64), ["layer9"])


def test_torchvisions_units_are_the_twenty():
    with torch.device("meta"):
        names = list(cuts.units(torchvision.models.resnet50()))
    blocks = [f"layer{i}.{j}" for i, n in enumerate([3, 4, 6, 3], 1) for j in range(n)]
    assert names == ["conv1", "maxpool", *blocks, "avgpool", "fc"]
    assert cuts.cut_units(["maxpool", "fc"]) == [("conv1",), tuple(names[1:-1]), ("fc",)]


def test_each_unit_computes_its_part_of_the_forward(data, whole):
    x = data[0]
    with torch.no_grad():
        for unit in cuts.units(whole.eval()).values():
            x = unit(x)
        torch.testing.assert_close(x, whole(data[0]), rtol=0, atol=0)
