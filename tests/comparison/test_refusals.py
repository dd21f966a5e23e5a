"""What cannot be compared or estimated is refused, before anything is sent."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mgpu_tutorial.comparison import estimates, training
from mgpu_tutorial.shared.data import pictures
from mgpu_tutorial.tensor_parallel.block import new_block

TINY = training.Experiment("shufflenet_v2_x0_5", 8, 48, 1)
DDP, ALONE, PARALLEL = (training.SETUPS[n] for n in ("DDP", "one device", "DataParallel"))


def train(rank, world_size, setup, experiment, count=2):
    data = pictures()
    return training.train_setup(rank, world_size, data, setup, experiment, count)


REFUSED = [
    (2, "2 ranks", train, (ALONE, TINY)),
    (2, "2 ranks", train, (PARALLEL, TINY)),
    (3, "a batch of 8 for 3 ranks", train, (DDP, TINY)),
    (2, "a batch of 1 for 2 ranks", train, (DDP, TINY._replace(batch=1))),
]


@pytest.mark.parametrize("world_size, words, worker, given", REFUSED)
def test_refused(refused, world_size, words, worker, given):
    refused(world_size, ValueError(words), worker, *given)


STEP = estimates.StepCost(10, 10, 10)


@pytest.mark.parametrize(
    "given", [(0, 1, 1, 1), (-1, 1, 1, 1), (1, 0, 1, 1), (1, 1, -1, 1), (1, 1, 1, 0)]
)
def test_a_step_takes_time(given):
    with pytest.raises(ValueError, match="one GPU"):
        estimates.seconds_at_least(STEP, *given)


@pytest.mark.parametrize("name", ["batch", "side"])
@pytest.mark.parametrize("wrong", [0, -4, 2.5, "8"])
def test_a_step_has_pictures_with_pixels(name, wrong):
    with pytest.raises(ValueError, match=f"^{name} must be a whole number, 1 or more, got"):
        estimates.count_step(TINY._replace(**{name: wrong}))


COUNTS = st.integers(0, 10**15)
RATES = st.floats(1, 1e20)


@given(st.builds(estimates.StepCost, COUNTS, COUNTS, COUNTS), st.integers(1, 99), RATES)
def test_a_step_lasts_as_long_as_its_longest_part(step, gpus, rate):
    parts = step.operations / gpus, 2 * step.saved / gpus
    parts += (8 * step.parameters * (gpus - 1) / gpus,)
    found = estimates.seconds_at_least(step, gpus, rate, rate, rate)
    assert found == pytest.approx(max(parts) / rate)


def frozen():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))


@pytest.mark.parametrize(
    "network, words",
    [
        (nn.Sequential(nn.ReLU()), "nothing to count"),
        (nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2)), "1.weight: only convolutions"),
        (nn.Sequential(nn.Linear(2, 2), nn.ConvTranspose2d(2, 2, 1)), "1.weight: only conv"),
        (nn.TransformerEncoderLayer(4, 2, 8), "self_attn.in_proj_weight: only conv"),
        (frozen(), "1.weight is frozen"),
    ],
)
def test_what_is_not_counted_is_refused(network, words):
    with pytest.raises(ValueError, match=words):
        estimates.count_operations(network, torch.ones(1, 2))


def test_products_without_a_weight_are_refused():
    with pytest.raises(ValueError, match="products of two activations are not counted"):
        estimates.count_operations(new_block().float(), torch.ones(1, 4, 48))


@pytest.mark.parametrize(
    "layer, shape, forward",
    [
        (nn.Linear(3, 5, bias=False), (4, 3), 2 * 4 * 15),
        (nn.Linear(3, 5), (2, 4, 3), 2 * 8 * 15),
        (nn.Conv1d(3, 5, 2), (1, 3, 7), 2 * 6 * 5 * 3 * 2),
        (nn.Conv2d(4, 4, 3, groups=4, stride=2), (2, 4, 5, 5), 2 * 2 * 4 * 4 * 9),
        (nn.Conv3d(2, 3, 2), (1, 2, 3, 3, 3), 2 * 3 * 8 * 2 * 8),
        (nn.Conv2d(3, 5, 1), (0, 3, 2, 2), 0),
    ],
)
def test_a_layer_is_counted_by_hand_twice_over(layer, shape, forward):
    for _ in range(2):  # forward and the weights' gradient; the images need none
        assert estimates.count_operations(layer, torch.ones(shape)) == 2 * forward
    assert not layer._forward_hooks


class Branches(nn.Module):
    """Two layers that take the images, and one that takes their sum."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.top = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, images):
        return self.top(self.left(images) + self.right(input=images))


@pytest.mark.parametrize("grad", [True, False])
def test_of_two_branches_neither_needs_the_gradient_of_the_images(grad):
    images, forward = torch.ones(2, 4), 2 * 2 * 16
    with torch.set_grad_enabled(grad):
        counted = estimates.count_operations(Branches(), images)
    assert counted == (2 + 2 + 3) * forward
    wanted = estimates.count_operations(Branches(), images.requires_grad_())
    assert wanted == 9 * forward


def test_a_layer_used_twice_is_counted_twice():
    layer = nn.Linear(2, 2)
    twice = estimates.count_operations(nn.Sequential(layer, layer), torch.ones(1, 2))
    assert twice == 2 * 8 + 3 * 8


class WithoutGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        with torch.no_grad():
            hidden = self.first(x)
        return self.last(hidden)


def test_a_layer_under_no_grad_is_not_counted_as_trained():
    with pytest.raises(ValueError, match="a layer works under no_grad"):
        estimates.count_operations(WithoutGradient(), torch.ones(2, 3))
