"""Recomputation keeps less and computes the same, but BatchNorm sees the images twice."""

import copy

import pytest
import torch

from mgpu_tutorial.model_parallel import figures
from mgpu_tutorial.model_parallel.recomputation import forward_in_groups
from mgpu_tutorial.shared.vision import torchvision
from tests.model_parallel.reference import SIDE, gradients_of, one_process


@pytest.mark.parametrize("group_size", [1, 3, 7, 20, 50])
def test_gradients_are_the_same_bits_and_the_running_mean_moves_twice(group_size):
    """As many units as ResNet-50, and a sixteenth of the channels inside a block."""
    images, labels = torch.randn(2, 3, 33, 33), torch.arange(2)
    model = torchvision.models.resnet50(num_classes=10, width_per_group=4)
    _, gradients = one_process(copy.deepcopy(model), images, labels, 1)
    start, calls = model.bn1.running_mean.clone(), []
    for block in (model.conv1, model.layer2[0].conv1, model.fc):
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    output = forward_in_groups(model, images, group_size)
    torch.nn.functional.cross_entropy(output, labels).backward()
    torch.testing.assert_close(gradients_of(model), gradients, rtol=0, atol=0)
    assert len(calls) == 6 and int(model.bn1.num_batches_tracked) == 2
    mean = model.conv1(images).mean((0, 2, 3)).detach()
    torch.testing.assert_close(model.bn1.running_mean, 0.81 * start + 0.19 * mean)


@pytest.mark.slow
def test_what_a_step_keeps_is_what_the_shapes_say(data, whole):
    """The plain network keeps all activations; in groups, what goes into each of them."""
    results = figures.measure_recomputation(whole, *data, [0, 1, 10, 20])
    plain, one, ten, all_of_them = results
    costs = figures.measure(4, SIDE)
    (network,) = figures.stage_costs(costs, [])
    assert plain[:3] == (0, network.activation_bytes - data[0].nbytes, 0)
    sent = {unit.name: unit.output_bytes for unit in costs}
    # avgpool itself keeps nothing, so its input, from layer4.2, is not needed again
    inputs = sum(sent.values()) - sent["layer4.2"] - sent["fc"]
    assert one[:3] == (1, inputs, max(sum(unit.saved.values()) for unit in costs))
    halves = figures.stage_costs(costs, ["layer3.1"])  # the eleventh unit
    inside = max(half.activation_bytes for half in halves)
    assert ten[:3] == (10, sent["layer3.0"], inside)
    assert all_of_them[:3] == (20, 0, network.activation_bytes)
    assert all(min(run[3:]) > 0 for run in results)
    assert int(whole.bn1.num_batches_tracked) == 2 + 3 * 2  # the first one to warm up


def test_a_table_says_how_long_it_took():
    results = [
        figures.RecomputationResult(0, 3 * 2**20, 0, 0.1, 0.2),
        figures.RecomputationResult(4, 2**20, 2**19, 0.1, 0.3),
    ]
    assert figures.seconds_table(results).rows == [
        ["keep everything", 100, 200, 300],
        ["groups of 4", 100, 300, 400],
    ]
