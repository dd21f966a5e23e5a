"""The split model is the unsplit one wherever it is cut; recomputation changes no bit."""

import copy

import pytest
import torch
from hypothesis import strategies as some
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab import devices
from mgpu_tutorial.model_parallel import resnet_cuts
from mgpu_tutorial.model_parallel import split_resnet as resnet
from mgpu_tutorial.shared.vision import torchvision
from tests.model_parallel.reference import gradients_of, one_process

BLOCKS = [f"layer{i}.{j}" for i, n in enumerate([3, 4, 6, 3], 1) for j in range(n)]
NAMES = ["conv1", "maxpool", *BLOCKS, "avgpool", "fc"]
PLACES = some.lists(some.sampled_from(NAMES[1:]), unique=True).map(
    lambda names: sorted(names, key=NAMES.index)
)


@pytest.mark.slow
@pytest.mark.parametrize("places", [("maxpool", "layer3.4", "avgpool", "fc"), ("layer3.0",)])
def test_a_split_model_computes_what_the_unsplit_one_does(data, whole, places):
    """Cut before and behind the blocks, between two of a layer, and between two layers."""
    several = devices(len(places) + 1)
    split = resnet.ModelParallelResNet50(several, cuts=places)
    split.load_state_dict(whole.state_dict())
    parts = zip(NAMES, resnet_cuts.units(split).values(), strict=True)
    for name, unit in parts:
        behind = sum(NAMES.index(place) <= NAMES.index(name) for place in places)
        assert {t.device for t in unit.state_dict().values()} <= {several[behind]}
    outputs = []
    for model in (split, whole):
        outputs.append(model(data[0]))
        cross_entropy(outputs[-1], data[1].to(outputs[-1].device)).backward()
    assert outputs[0].device == several[-1]
    torch.testing.assert_close(outputs[0].cpu(), outputs[1], rtol=0, atol=0)
    torch.testing.assert_close(gradients_of(split), gradients_of(whole), rtol=0, atol=0)
    found, expected = dict(split.named_buffers()), dict(whole.named_buffers())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].cpu(), expected[name]) for name in expected)


def test_torchvisions_units_are_the_twenty():
    with torch.device("meta"):
        model = torchvision.models.resnet50()
    assert list(resnet_cuts.units(model)) == list(resnet_cuts.UNITS) == NAMES


@pytest.mark.parametrize(
    "devices, places, says",
    [
        (1, ("layer3.0",), "make 2 stages"),
        (3, ("layer3.0",), "make 2 stages"),
        (2, ("layer5.0",), "cuts must be a list of maxpool, layer1.0"),
        (3, "fc", "cuts must be a list"),
        (3, ("layer3.0", "layer1.0"), "order of the network"),
    ],
)
def test_what_cannot_be_cut_is_refused(devices, places, says):
    with torch.device("meta"), pytest.raises(ValueError, match=says):
        resnet.ModelParallelResNet50(["meta"] * devices, cuts=places)


@pytest.mark.parametrize("group_size", [1, 3, 7, 20, 50])
def test_gradients_are_the_same_bits_and_the_running_mean_moves_twice(group_size):
    """As many units as ResNet-50, and a sixteenth of the channels inside a block."""
    images, labels = torch.randn(2, 3, 33, 33), torch.arange(2)
    model = torchvision.models.resnet50(num_classes=10, width_per_group=4)
    _, gradients = one_process(copy.deepcopy(model), images, labels, 1)
    start, calls = model.bn1.running_mean.clone(), []
    for block in (model.conv1, model.layer2[0].conv1, model.fc):
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    output = resnet.forward_in_groups(model, images, group_size)
    cross_entropy(output, labels).backward()
    torch.testing.assert_close(gradients_of(model), gradients, rtol=0, atol=0)
    assert len(calls) == 6 and int(model.bn1.num_batches_tracked) == 2
    mean = model.conv1(images).mean((0, 2, 3)).detach()
    torch.testing.assert_close(model.bn1.running_mean, 0.81 * start + 0.19 * mean)
