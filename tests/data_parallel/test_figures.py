"""What is measured is what shapes and a plain step say; what is drawn is what is there."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from mgpu_tutorial.data_parallel import experiments, figures
from mgpu_tutorial.lab import devices
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
def test_the_exercise_takes_what_is_right_and_nothing_else(capsys):
    right = ['reduction, divisor = "sum", 10', 'reduction, divisor = "none", 10.0']
    wrong = {
        "reduction, divisor = ..., ...": "nothing is filled in",
        'reduction, divisor = "mean", 4': "the loss is",
        'reduction, divisor = "sum", 4': "the loss is",
    }
    try_answers(capsys, "06_data_parallel", "reduction", right, wrong)
