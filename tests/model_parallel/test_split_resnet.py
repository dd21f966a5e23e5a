"""ResNet-50 is cut between its twenty units; what cannot be cut is refused."""

import pytest
import torch
from hypothesis import strategies as some

from mgpu_tutorial.model_parallel import split_resnet as resnet
from mgpu_tutorial.shared.vision import torchvision

BLOCKS = [f"layer{i}.{j}" for i, n in enumerate([3, 4, 6, 3], 1) for j in range(n)]
NAMES = ["conv1", "maxpool", *BLOCKS, "avgpool", "fc"]
PLACES = some.lists(some.sampled_from(NAMES[1:]), unique=True).map(
    lambda names: sorted(names, key=NAMES.index)
)


def test_torchvisions_units_are_the_twenty():
    with torch.device("meta"):
        model = torchvision.models.resnet50()
    assert list(resnet.units(model)) == list(resnet.UNITS) == NAMES


@pytest.mark.parametrize(
    "places", [("layer5.0",), "fc", ("conv1",), ("layer3.0", "layer1.0"), ("fc", "fc")]
)
def test_what_cannot_be_cut_is_refused(places):
    with pytest.raises(ValueError, match="some of maxpool, layer1.0, .*, fc, in this order"):
        resnet.cut_units(places)
