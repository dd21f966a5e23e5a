"""What is measured is what shapes and a plain step say; what is drawn is what is there."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.data_parallel import experiments, figures, wrapper
from mgpu_tutorial.lab import Ledger, devices
from tests.data_parallel.test_wrapper import batch, pixel_net
from tests.test_exercises import try_answers


@pytest.mark.parametrize("count", [1, 2, 4])
def test_eight_steps_train_like_a_plain_loop(count):
    several, (images, labels) = devices(count), batch(10)
    plain, net = pixel_net(), pixel_net().to(several[0])
    settings = {"lr": 0.05, "momentum": 0.9}
    optimizer = torch.optim.SGD(net.parameters(), **settings)
    other = torch.optim.SGD(plain.parameters(), **settings)
    for _ in range(3):
        figures.eight_steps(net, optimizer, images, labels, several)
        other.zero_grad()
        cross_entropy(plain(images), labels).backward()
        other.step()
    for parameter, expected in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach().cpu(), expected.detach())


def test_the_eight_steps_tell_where_everything_is(d):
    net = nn.Linear(4, 2, bias=False).to(d[0])
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    images, labels = torch.randn(9, 4), torch.zeros(9).long()
    steps = figures.eight_steps(net, optimizer, images, labels, d[:3])
    assert [int(title[0]) for title, _ in steps] == list(range(9))
    gradients = steps[6][1]["gradient"]
    assert [g.device for g in gradients] == list(d[:3])
    (summed,) = steps[7][1]["gradient"]
    torch.testing.assert_close(sum(g.cpu() for g in gradients), summed.cpu())

    frames = [repr(frame).splitlines() for frame in figures.placement(steps).frames]
    assert frames[0] == [
        "0. before",
        "  cpu: + batch 9×4",
        "  virtual:0: + module 8 numbers",
        "  virtual:1: nothing",
        "  virtual:2: nothing",
    ]
    others = [frame[3] for frame in frames[1:]]
    assert others == [
        "  virtual:1: + piece 1 3×4",
        "  virtual:1: piece 1 3×4, + replica 1 8 numbers",
        "  virtual:1: piece 1 3×4, replica 1 8 numbers, + output 1 3×2",
        "  virtual:1: piece 1 3×4, replica 1 8 numbers",
        "  virtual:1: piece 1 3×4, replica 1 8 numbers",
        "  virtual:1: replica 1 8 numbers, + gradient 1 2×4",
        "  virtual:1: nothing",
        "  virtual:1: nothing",
    ]
    assert frames[4][2].endswith("replica 0 8 numbers, + gathered 9×2")
    assert frames[5][2].endswith("gathered 9×2, + loss scalar")
    assert frames[7][2] == frames[8][2].replace("gradient", "+ gradient")
    assert frames[7][2] == "  virtual:0: module 8 numbers, + gradient 2×4"


def test_one_step_is_that_of_a_copy_of_the_net(d):
    images, labels = batch(10)
    net, plain = pixel_net(), pixel_net()
    step = figures.one_step(net, images, labels, d)
    output = plain(images)
    cross_entropy(output, labels).backward()
    expected = {
        "outputs": [output.detach()],
        "gradients": [p.grad for p in plain.parameters()],
    }
    torch.testing.assert_close(step, expected)
    assert all(p.grad is None and p.device.type == "cpu" for p in net.parameters())


@pytest.mark.parametrize("samples, count, classes", [(32, 4, 20), (12, 3, 5), (8, 1, 9)])
@pytest.mark.parametrize("inside", [False, True])
def test_memory_is_what_the_shapes_say(samples, count, classes, inside):
    several, pixels = devices(count), 16 * 16
    net = experiments.PixelNet(hidden=16, classes=classes).to(several[0])
    images = torch.zeros(samples, 3, 16, 16)
    labels = torch.zeros(samples, 16, 16, dtype=torch.int64)
    ledger = figures.memory_of_step(net, images, labels, several, inside)

    weights = 4 * sum(p.numel() for p in net.parameters())
    activations = 4 * pixels * (3 + 16 + 16)  # of a sample: the inputs of three layers
    loss = pixels * (4 * classes + 8)  # its log-softmax, and the labels
    outputs = pixels * 4 * classes
    for device in several:
        expected = weights + samples // count * (activations + (loss if inside else 0))
        if device == several[0]:
            expected += 2 * weights  # gradients and momentum
            expected += 4 * count if inside else samples * (loss + outputs)
        assert ledger.total(device) == pytest.approx(expected, rel=0.01)
    gathered = 4 * count if inside else samples * outputs
    assert ledger[several[0]]["gathered outputs"] == gathered


@pytest.mark.slow
def test_the_meta_device_predicts_what_mobilenet_keeps():
    net = experiments.mobilenet()
    ledger = Ledger()
    with ledger.saved_for_backward(net):
        net(torch.randn(2, 3, 32, 32))
    assert ledger["cpu"]["activations"] == figures.saved_bytes_from_shapes(2, 32)


def gathering(result):
    return f"def gather_any(outputs, device):\n    return {result}"


EACH = "for k in outputs[0]}"
BY_GATHER = gathering("{k: wrapper.gather([o[k] for o in outputs], device) " + EACH)
BY_CAT = gathering("{k: torch.cat([o[k].to(device) for o in outputs]) " + EACH)
EXERCISES = {
    "gather_any": (
        [BY_GATHER, BY_CAT],
        {
            gathering("..."): "nothing is filled in",
            gathering("outputs[0]"): "answer[0]",
            gathering("wrapper.gather(outputs, device)"): "gather joins tensors, got dict",
        },
    ),
    "reduction": (
        ['reduction, divisor = "sum", 10', 'reduction, divisor = "none", 10.0'],
        {
            "reduction, divisor = ..., ...": "nothing is filled in",
            'reduction, divisor = "mean", 4': "the loss is",
            'reduction, divisor = "sum", 4': "the loss is",
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXERCISES)
def test_an_exercise_takes_what_is_right_and_nothing_else(capsys, name):
    try_answers(capsys, "06_data_parallel", name, *EXERCISES[name], wrapper=wrapper)
