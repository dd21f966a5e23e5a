"""The split model is the unsplit one, on devices and on ranks."""

import pytest
import torch

from mgpu_tutorial.lab import devices, launch
from mgpu_tutorial.model_parallel import resnet_cuts as cuts
from mgpu_tutorial.model_parallel import split_resnet as resnet
from mgpu_tutorial.shared.vision import torchvision
from tests.model_parallel.conftest import torchvisions
from tests.model_parallel.reference import SIDE, assert_same, gradients_of
from tests.thorough import again, thorough


def split_model(several, weights, **settings):
    with torch.device("meta"):
        model = resnet.ModelParallelResNet50(several, **settings)
    model.load_state_dict(weights)
    return model


def run(model, images, labels):
    """Output, gradients and buffers behind one step, on the CPU."""
    out = model(images)
    torch.nn.functional.cross_entropy(out, labels.to(out.device)).backward()
    buffers = {name: values.cpu() for name, values in model.named_buffers()}
    return out.detach().cpu(), gradients_of(model), buffers


@pytest.fixture(scope="module")
def unsplit(data, weights):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the tests: other kernels round differently
    found = run(torchvisions(weights), *data)
    torch.set_num_threads(threads)
    return found


def assert_same_step(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=0)
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize(
    "places", [("maxpool", "layer3.4", "avgpool", "fc"), again(("layer3.0",))]
)
def test_a_split_model_computes_what_the_unsplit_one_does(data, weights, unsplit, places):
    """Cut before and behind the blocks, between two of a layer, and between two layers."""
    model = split_model(devices(len(places) + 1), weights, cuts=places)
    assert_same_step(run(model, *data), unsplit)


def test_weights_go_to_torchvision_and_back():
    model = resnet.ModelParallelResNet50(devices(2), num_classes=10)
    with torch.device("meta"):
        whole = torchvision.models.resnet50(num_classes=10)
        again = resnet.ModelParallelResNet50(devices(2), num_classes=10)
    assert list(model.state_dict()) == list(whole.state_dict())
    whole.to_empty(device="cpu").load_state_dict(model.state_dict())
    again.load_state_dict(whole.state_dict())
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other) and one.device == other.device


@pytest.mark.parametrize("made_on", ["cpu", "meta"])
def test_each_stage_lies_on_its_device(made_on):
    several = devices(2)
    with torch.device(made_on):
        model = resnet.ModelParallelResNet50(several)
    assert {p.device for p in model.layer2.parameters()} == {several[0]}
    assert {p.device for p in model.layer3.parameters()} == {several[1]}
    assert model.fc.weight.device == several[1] and model.conv1.weight.device == several[0]


def test_a_model_made_with_weights_takes_others(data, weights, unsplit):
    """And one device named twice is enough."""
    model = resnet.ModelParallelResNet50(("cpu", "cpu"))
    model.load_state_dict(weights)
    assert_same_step(run(model, *data), unsplit)


@pytest.mark.parametrize(
    "given, places, says",
    [
        (("cpu",), ("layer3.0",), "at least two in all"),
        (("cpu",), (), "at least two in all"),
        ("cpu", ("layer3.0",), "at least two in all"),
        (("cpu", "cpu", "cpu"), ("layer3.0",), "1 cut.s. make 2 stages"),
        (("cpu", "cpu"), ("layer5.0",), "cuts must be a list of maxpool, layer1.0"),
        (("cpu", "cpu"), ("conv1",), "cuts must be a list"),
        (("cpu", "cpu"), "fc", "cuts must be a list"),
        (("cpu",) * 3, ("layer3.0", "layer1.0"), "order of the network"),
        (("cpu",) * 3, ("layer3.0", "layer3.0"), "order of the network"),
    ],
)
def test_what_cannot_be_cut_is_refused(given, places, says):
    with pytest.raises(ValueError, match=says):
        resnet.ModelParallelResNet50(given, cuts=places)


def test_a_rank_makes_its_own_stage_only(weights):
    part = resnet.new_model(own=cuts.cut_units(["layer4.1"])[1])
    assert part.conv1.weight.is_meta and not part.layer4[1].conv1.weight.is_meta
    assert torch.equal(part.fc.weight, weights["fc.weight"])
    assert not torch.equal(resnet.new_model(4, own=("fc",)).fc.weight, part.fc.weight)
    zeros = resnet.zero_model().state_dict()
    assert list(zeros) == list(weights)
    assert not any(values.any() for values in zeros.values())


def test_no_two_blocks_of_a_model_begin_alike(weights):
    """Blocks of a layer have equal shapes, and must not have equal weights."""
    for layer, blocks in (("layer1", 3), ("layer2", 4), ("layer3", 6), ("layer4", 3)):
        drawn = [weights[f"{layer}.{block}.conv2.weight"] for block in range(1, blocks)]
        for i, one in enumerate(drawn):
            assert not any(torch.equal(one, other) for other in drawn[:i])


def test_the_images_are_the_same_on_every_rank(data):
    torch.manual_seed(7)  # whatever else was drawn before
    for mine, expected in zip(resnet.random_images(4, SIDE), data, strict=True):
        assert torch.equal(mine, expected)


@thorough
@pytest.mark.parametrize("micro", [1, 2])
def test_an_unsplit_step_is_the_reference(data, whole, expected, micro):
    resnet.unsplit_step(whole, *data, micro)
    found = resnet.gradients(whole)
    assert list(found) == [name for name, _ in whole.named_parameters()]
    assert_same(found, expected(micro)[1])


@thorough
def test_a_rank_may_have_two_devices(expected):
    """Its model begins as all others do, and its micro-batches are averaged."""
    report = launch(resnet.step_on_two_devices, 1, micro=2, image_size=SIDE, timeout=60)
    assert report.results == [pytest.approx(expected(2)[0], rel=1e-4)]
