"""What cannot be split is refused in words, and what can be is right."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from mgpu_tutorial.model_parallel import micro_batches as mb
from mgpu_tutorial.model_parallel import ranks as workers
from mgpu_tutorial.model_parallel.split_resnet import ModelParallelResNet50, split
from mgpu_tutorial.shared import small_and_large as sizes

UNITS = dict.fromkeys(["conv1", "layer1", "layer2", "fc"])
TWO = [torch.device("meta")] * 2


def parts_of(size, micro):
    return lambda: mb.equal_parts(torch.zeros(size, 4), torch.zeros(size), micro)


def resnet(devices, cuts=("layer3.0",)):
    def new():
        with torch.device("meta"):
            ModelParallelResNet50(devices, cuts=cuts)

    return new


@pytest.mark.parametrize(
    "call, words",
    [
        (parts_of(6, 4), "6 samples .* 4 equal"),
        (parts_of(6, 7), "6 samples .* 7 equal"),
        (lambda: split(UNITS, ["layer3"]), "layer1, layer2, fc.*'layer3'"),
        (resnet(TWO, ("layer3",)), "layer3.0.*'layer3'"),
        (resnet(TWO[:1]), None),
        (resnet(TWO * 2), None),
    ],
)
def test_it_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@given(some.sets(some.sampled_from(list(UNITS)[1:])))
def test_stages_begin_at_the_cuts_in_the_order_of_the_network(cuts):
    stages = split(UNITS, [*cuts])
    assert [name for stage in stages for name in stage] == list(UNITS)
    begins = [name for name in UNITS if name in cuts]
    assert [next(iter(stage)) for stage in stages] == ["conv1", *begins]


@given(some.integers(1, 12), some.integers(1, 4))
def test_equal_parts_are_the_batch_in_order(micro, each):
    inputs, targets = torch.arange(2 * micro * each).view(-1, 2), torch.arange(micro * each)
    parts = mb.equal_parts(inputs, targets, micro)
    assert len(parts) == micro
    for i, (x, y) in enumerate(parts):
        rows = slice(i * each, (i + 1) * each)
        assert torch.equal(x, inputs[rows]) and torch.equal(y, targets[rows])


@pytest.mark.parametrize("count", [1, 3])
def test_two_stages_are_for_two_ranks(refused, count):
    what = workers.train_split, 1, sizes.small, sizes.SMALL
    refused(count, ValueError(f"got {count}"), *what)
