"""Recomputation keeps less and computes the same, but BatchNorm sees the images twice."""

import copy

import pytest
import torch

from mgpu_tutorial.model_parallel import measurements
from mgpu_tutorial.model_parallel.recomputation import forward_in_groups
from mgpu_tutorial.shared.vision import torchvision
from tests.model_parallel.reference import SIDE, assert_same, gradients_of, one_process
from tests.thorough import thorough


def check_a_step_in_groups(model, data, expected, group_size):
    start = model.bn1.running_mean.clone()
    images, labels = data
    output = forward_in_groups(model, images, group_size)
    torch.nn.functional.cross_entropy(output, labels).backward()
    assert_same(gradients_of(model), expected)
    assert int(model.bn1.num_batches_tracked) == 2
    mean = model.conv1(images).mean((0, 2, 3)).detach()
    torch.testing.assert_close(model.bn1.running_mean, 0.81 * start + 0.19 * mean)


@thorough
def test_gradients_are_the_same_bits_and_the_running_mean_moves_twice(data, whole, expected):
    check_a_step_in_groups(whole, data, expected(1)[1], 4)


@pytest.mark.parametrize("group_size", [1, 7, 20])
def test_so_they_do_in_groups_of_any_size(group_size):
    """As many units as ResNet-50, and a sixteenth of the channels inside a block."""
    data = torch.randn(2, 3, 33, 33), torch.arange(2)
    model = torchvision.models.resnet50(num_classes=10, width_per_group=4)
    _, expected = one_process(copy.deepcopy(model), *data, 1)
    check_a_step_in_groups(model, data, expected, group_size)


@thorough
def test_what_a_step_keeps_is_what_the_shapes_say(data, whole):
    """The plain network keeps all activations; in groups, what goes into each of them."""
    plain, one, ten, all_of_them = measurements.measure_kept(whole, *data, [0, 1, 10, 20])
    costs = measurements.measure(4, SIDE)
    (network,) = measurements.stage_costs(costs, [])
    assert plain[:3] == (0, network.activation_bytes - data[0].nbytes, 0)
    sent = {unit.name: unit.output_bytes for unit in costs}
    # avgpool itself keeps nothing, so its input, from layer4.2, is not needed again
    inputs = sum(sent.values()) - sent["layer4.2"] - sent["fc"]
    assert one[:3] == (1, inputs, max(sum(unit.saved.values()) for unit in costs))
    halves = measurements.stage_costs(costs, ["layer3.1"])  # the eleventh unit
    inside = max(half.activation_bytes for half in halves)
    assert ten[:3] == (10, sent["layer3.0"], inside)
    assert all_of_them[:3] == (20, 0, network.activation_bytes)
    assert min(run.backward_seconds for run in (plain, one, ten, all_of_them)) > 0


def test_a_table_says_what_was_kept_and_how_long_it_took():
    found = [
        measurements.Kept(0, 3 * 2**20, 0, 0.1, 0.2),
        measurements.Kept(4, 2**20, 2**19, 0.1, 0.3),
    ]
    assert measurements.kept_table(found).rows == [
        ["keep everything", "3.0", "0.0", "3.0"],
        ["groups of 4", "1.0", "0.5", "1.5"],
    ]
    assert measurements.seconds_table(found).rows == [
        ["keep everything", 100, 200, 300],
        ["groups of 4", 100, 300, 400],
    ]


def test_the_largest_distance_is_a_share():
    one = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([1.0])}
    other = {"a": torch.tensor([0.0, 4.0]), "b": torch.tensor([2.0])}
    assert measurements.largest_distance(one, other) == 0.75
