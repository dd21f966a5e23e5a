"""Where ResNet-50 can be cut, against torchvision's network."""

import pytest
import torch
from hypothesis import strategies as some

from mgpu_tutorial.model_parallel import resnet_cuts
from mgpu_tutorial.model_parallel.split_resnet import ModelParallelResNet50
from mgpu_tutorial.shared.vision import torchvision

BLOCKS = [f"layer{i}.{j}" for i, n in enumerate([3, 4, 6, 3], 1) for j in range(n)]
NAMES = ["conv1", "maxpool", *BLOCKS, "avgpool", "fc"]
PLACES = some.lists(some.sampled_from(NAMES[1:]), unique=True).map(
    lambda names: sorted(names, key=NAMES.index)
)


@pytest.mark.parametrize(
    "size, sides",  # behind conv1, the pooling and each layer, by the strides
    [
        (64, (32, 16, 16, 8, 4, 2)),
        (75, (38, 19, 19, 10, 5, 3)),
        (224, (112, 56, 56, 28, 14, 7)),
    ],
)
def test_shapes_are_those_of_the_network(size, sides):
    conv, pool, one, two, three, four = sides
    shapes = [[2, 3, size, size], [2, 64, conv, conv], [2, 64, pool, pool]]
    shapes += 3 * [[2, 256, one, one]] + 4 * [[2, 512, two, two]]
    shapes += 6 * [[2, 1024, three, three]] + 3 * [[2, 2048, four, four]]
    shapes += [[2, 2048], [2, 1000]]
    assert resnet_cuts.stage_shapes(NAMES[1:], 2, size) == shapes


def test_torchvisions_units_are_the_twenty():
    with torch.device("meta"):
        model = torchvision.models.resnet50()
    assert list(resnet_cuts.units(model)) == list(resnet_cuts.UNITS) == NAMES


@pytest.mark.parametrize("places", [[], ["layer2.1"], ["maxpool", "layer4.0", "fc"]])
def test_each_stage_turns_the_shape_before_it_into_the_next(places):
    with torch.device("meta"):
        stages = resnet_cuts.cut(torchvision.models.resnet50(), places)
        x = torch.empty(2, 3, 32, 32)
    shapes = [list(x.shape)]
    for stage in stages:
        x = stage(x)
        shapes.append(list(x.shape))
    assert resnet_cuts.stage_shapes(places, 2, 32) == shapes


def test_the_stages_compute_the_forward():
    model = torchvision.models.resnet50(num_classes=10, width_per_group=4).eval()
    images = x = torch.randn(2, 3, 33, 33)
    with torch.no_grad():
        for stage in resnet_cuts.cut(model, ["maxpool", "layer2.1", "fc"]):
            x = stage(x)
        torch.testing.assert_close(x, model(images), rtol=0, atol=0)


@pytest.mark.parametrize(
    "devices, places, says",
    [
        (("cpu",), ("layer3.0",), "at least two in all"),
        (("cpu",), (), "at least two in all"),
        ("cpu", ("layer3.0",), "at least two in all"),
        (("cpu", "cpu", "cpu"), ("layer3.0",), "1 cut.s. make 2 stages"),
        (("cpu", "cpu"), ("layer1.0", "layer3.0"), "2 cut.s. make 3 stages"),
        (("cpu", "cpu"), ("layer5.0",), "cuts must be a list of maxpool, layer1.0"),
        (("cpu", "cpu"), ("conv1",), "cuts must be a list"),
        (("cpu", "cpu"), "fc", "cuts must be a list"),
        (("cpu",) * 3, ("layer3.0", "layer1.0"), "order of the network"),
        (("cpu",) * 3, ("layer3.0", "layer3.0"), "order of the network"),
    ],
)
def test_what_cannot_be_cut_is_refused(devices, places, says):
    with pytest.raises(ValueError, match=says):
        ModelParallelResNet50(devices, cuts=places)
