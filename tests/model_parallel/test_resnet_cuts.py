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
    [(64, (32, 16, 16, 8, 4, 2)), (75, (38, 19, 19, 10, 5, 3))],
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


@pytest.mark.parametrize(
    "devices, places, says",
    [
        (1, ("layer3.0",), "at least two in all"),
        (3, ("layer3.0",), "1 cut.s. make 2 stages"),
        (2, ("layer1.0", "layer3.0"), "2 cut.s. make 3 stages"),
        (2, ("layer5.0",), "cuts must be a list of maxpool, layer1.0"),
        (2, "fc", "cuts must be a list"),
        (3, ("layer3.0", "layer1.0"), "order of the network"),
    ],
)
def test_what_cannot_be_cut_is_refused(devices, places, says):
    with pytest.raises(ValueError, match=says):
        ModelParallelResNet50(["cpu"] * devices, cuts=places)
