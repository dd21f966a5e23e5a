"""The split model is the unsplit one, on devices and on ranks."""

import copy

import pytest
import torch
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab import devices
from mgpu_tutorial.model_parallel import resnet_cuts
from mgpu_tutorial.model_parallel import split_resnet as resnet
from mgpu_tutorial.shared.vision import torchvision
from tests.model_parallel.reference import gradients_of, one_process


def take_step(model, images, labels):
    """Output, gradients and buffers behind one step, on the CPU."""
    out = model(images)
    cross_entropy(out, labels.to(out.device)).backward()
    buffers = {name: values.cpu() for name, values in model.named_buffers()}
    return out.detach().cpu(), gradients_of(model), buffers


@pytest.mark.slow
@pytest.mark.parametrize("places", [("maxpool", "layer3.4", "avgpool", "fc"), ("layer3.0",)])
def test_a_split_model_computes_what_the_unsplit_one_does(data, weights, whole, places):
    """Cut before and behind the blocks, between two of a layer, and between two layers."""
    with torch.device("meta"):
        model = resnet.ModelParallelResNet50(devices(len(places) + 1), cuts=places)
    model.load_state_dict(weights)
    split, unsplit = take_step(model, *data), take_step(whole, *data)
    torch.testing.assert_close(split, unsplit, rtol=0, atol=0)


@pytest.mark.parametrize("made_on", [pytest.param("cpu", marks=pytest.mark.slow), "meta"])
@pytest.mark.parametrize("places", [("layer3.0",), ("maxpool", "fc")])
def test_each_stage_lies_on_its_device(made_on, places):
    several = devices(len(places) + 1)
    with torch.device(made_on):
        model = resnet.ModelParallelResNet50(several, cuts=places)
    units = resnet_cuts.units(model)
    for device, names in zip(several, resnet_cuts.cut_units(places), strict=True):
        tensors = [t for name in names for t in units[name].state_dict().values()]
        assert {t.device for t in tensors} <= {device}
    assert model.conv1.weight.device == several[0]
    assert model.fc.weight.device == several[-1] != several[0]


def test_a_rank_makes_its_own_stage_only_and_all_ranks_make_one_model(weights):
    places = ["layer1.1", "layer4.1"]
    made = {}
    for names in resnet_cuts.cut_units(places):
        part = resnet.new_resnet50(own=names)
        units = resnet_cuts.units(part)
        for name, unit in units.items():
            assert all(t.is_meta != (name in names) for t in unit.state_dict().values())
        made |= {name: t for name, t in part.state_dict().items() if not t.is_meta}
    assert made.keys() == weights.keys()
    torch.testing.assert_close(made, dict(weights), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 2])
def test_an_unsplit_step_is_the_reference(data, whole, expected, micro):
    resnet.unsplit_step(whole, *data, micro)
    torch.testing.assert_close(gradients_of(whole), expected(micro)[1], rtol=0, atol=0)


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
