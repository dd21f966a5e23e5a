"""What is measured is what the shapes and a plain step say."""

import copy

import pytest
import torch
from torch import nn

from mgpu_tutorial.data_parallel import experiments, measurements
from mgpu_tutorial.lab import Ledger, devices, placement


def batch(count=24, side=8):
    """Images that become brighter along the batch, so that pieces have other statistics."""
    generator = torch.Generator().manual_seed(1)
    images = torch.rand(count, 3, side, side, generator=generator)
    labels = torch.randint(20, (count, side, side), generator=generator)
    return images * torch.linspace(1, 4, count).view(-1, 1, 1, 1), labels


def pixel_net(norm=True):
    torch.manual_seed(0)
    net = experiments.PixelNet(hidden=4)
    net.norm = net.norm if norm else nn.Identity()
    return net


def plain_step(net, images, labels):
    """A training step of a plain module on the CPU, and all that it leaves behind."""
    net = copy.deepcopy(net)
    output = net(images)
    loss = nn.functional.cross_entropy(output, labels)
    loss.backward()
    has_norm = isinstance(net.norm, nn.BatchNorm2d)
    return {
        "outputs": [output.detach()],
        "loss": [loss.detach()],
        "gradients": [parameter.grad for parameter in net.parameters()],
        "running mean": [net.norm.running_mean] if has_norm else [],
        "running variance": [net.norm.running_var] if has_norm else [],
    }


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("net", [pixel_net(norm=False), pixel_net().eval()])
def test_one_step_on_several_devices_is_a_plain_step(d, net, count):
    images, labels = batch()
    found, expected = (
        measurements.one_step(net, images, labels, d[:count]),
        plain_step(net, images, labels),
    )
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-4, atol=1e-6)


def test_batch_norm_differs_and_keeps_the_first_pieces_statistics(d):
    images, labels = batch()
    several = measurements.one_step(pixel_net(), images, labels, d)
    whole = plain_step(pixel_net(), images, labels)
    first_piece = plain_step(pixel_net(), images[:6], labels[:6])
    for name in whole:
        assert measurements.distance(several[name], whole[name]) > 1e-4, name
    for name in ("running mean", "running variance"):
        torch.testing.assert_close(several[name], first_piece[name], rtol=0, atol=0)


@pytest.mark.parametrize(
    "a, b, expected",
    [
        ([[1.0, 2.0]], [[1.0, 2.0]], 0),
        ([[1.0, 2.5]], [[1.0, -2.0]], 4.5 / 2),
        ([[0.0], [3.0, -9.0]], [[1.0], [3.0, -8.0]], 1 / 8),
        ([[0.5]], [[0.0]], 0.5),
        ([], [], 0),
    ],
)
def test_a_distance_is_a_share_of_the_largest_value(a, b, expected):
    a, b = ([torch.tensor(row) for row in rows] for rows in (a, b))
    assert measurements.distance(a, b) == pytest.approx(expected)


# Memory


@pytest.mark.parametrize("samples, count, classes", [(32, 4, 20), (12, 3, 5), (8, 1, 9)])
def test_memory_is_what_the_shapes_say(samples, count, classes):
    several, pixels = devices(count), 16 * 16
    net = experiments.PixelNet(hidden=16, classes=classes).to(several[0])
    images = torch.zeros(samples, 3, 16, 16)
    labels = torch.zeros(samples, 16, 16, dtype=torch.int64)
    weights = 4 * sum(p.numel() for p in net.parameters())
    own = samples // count * 4 * pixels * (3 + 16 + 16) + weights
    whole = samples * pixels * (8 + 2 * 4 * classes)
    for inside in (False, True):
        ledger = measurements.memory_of_step(net, images, labels, several, inside)
        for device in several:
            expected = own + (2 * weights if device == several[0] else 0)
            if inside:
                expected += samples // count * pixels * (8 + 4 * classes)
            elif device == several[0]:
                expected += whole
            elif count == 1:
                expected -= samples * 4 * classes * pixels
            assert ledger.total(device) == pytest.approx(expected, rel=0.01)
    assert ledger[several[0]]["gathered outputs"] == 4 * count


def test_the_first_device_is_the_tall_one_until_the_loss_moves_inside(d):
    images, labels = batch(32, 16)
    net = experiments.PixelNet().to(d[0])
    outside = measurements.memory_of_step(net, images, labels, d)
    inside = measurements.memory_of_step(net, images, labels, d, inside=True)
    assert outside.total(d[0]) > 4 * outside.total(d[1])
    assert inside.total(d[0]) < 1.1 * inside.total(d[1])


def test_the_meta_device_predicts_what_mobilenet_keeps():
    net, _, _ = experiments.mobilenet(1)
    ledger = Ledger()
    with ledger.saved_for_backward(net):
        net(torch.randn(2, 3, 32, 32))
    assert ledger["cpu"]["activations"] == measurements.saved_bytes_from_shapes(2, 32)


# Where things are


def test_the_recorder_shows_where_everything_is_after_each_of_the_real_steps(d):
    net = nn.Linear(4, 2, bias=False).to(d[0])
    net_before = net.weight.detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    recorder = measurements.StepRecorder("0. before", batch=torch.randn(9, 4), module=net)
    images, labels = torch.randn(9, 4), torch.zeros(9).long()
    measurements.eight_steps(net, optimizer, images, labels, d[:3], recorder)
    assert not torch.equal(net.weight, net_before) and len(recorder.steps) == 9
    assert recorder.steps[0][1].keys() == {"batch", "module"}

    *_, (_, after_backward), (_, summed), _ = recorder.steps
    gradients = [gradient.cpu() for gradient in after_backward["gradient"]]
    assert [g.device for g in after_backward["gradient"]] == list(d[:3])
    torch.testing.assert_close(sum(gradients), summed["gradient"][0].cpu())

    frames = placement(recorder.steps).frames
    assert len({(frame.width, frame.height) for frame in frames}) == 1
    second = repr(frames[2]).splitlines()[3]
    assert second == "  virtual:1: piece 1 3×4, + replica 1 8 numbers"
    assert (
        repr(frames[6]).splitlines()[4]
        == "  virtual:2: replica 2 8 numbers, + gradient 2 2×4"
    )
    assert repr(frames[7]).splitlines()[2] == "  virtual:0: module 8 numbers, + gradient 2×4"
    assert repr(frames[8]).splitlines()[3] == "  virtual:1: nothing"
