"""Micro-batches in one process: the same gradients, in order, and nothing kept too long."""

import copy
import itertools
import threading
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from mgpu_tutorial.lab import devices
from mgpu_tutorial.model_parallel import micro_batches
from mgpu_tutorial.model_parallel.split_resnet import ModelParallelResNet50, unsplit_step
from mgpu_tutorial.model_parallel.tasks import in_order
from tests.model_parallel.reference import equal_stacks, gradients_of, one_process


class Stages(torch.nn.Module):
    """Linear stages on the CPU, as a step wants them."""

    def __init__(self, count=2):
        super().__init__()
        self.stages = equal_stacks(1, 4, count)
        self.layers = torch.nn.ModuleList(self.stages)  # a list hides its parameters
        self.devices = [torch.device("cpu")] * count

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


def batch(size=8):
    draw = torch.Generator().manual_seed(size)
    return torch.randn(size, 4, generator=draw), torch.arange(size) % 4


@given(stages=some.integers(1, 4), micro=some.integers(1, 5), size=some.integers(1, 3))
def test_any_number_of_stages_and_micro_batches_is_one_process(stages, micro, size):
    images, labels = batch(size * micro)
    loss, gradients = one_process(Stages(stages), images, labels, micro)
    model = Stages(stages)
    mean_loss, tasks = micro_batches.take_step(model, images, labels, micro)
    assert mean_loss == pytest.approx(loss, rel=1e-5)
    torch.testing.assert_close(gradients_of(model), gradients, rtol=0, atol=0)
    ends = {(t.kind, t.stage, t.micro): t.end for t in tasks}
    assert len(ends) == len(tasks) == 2 * stages * micro
    for task in tasks:
        neighbour = task.stage - 1 if task.kind == "F" else task.stage + 1
        earlier = ends.get((task.kind, neighbour, task.micro), 0.0)
        assert task.row == task.stage and earlier <= task.begin <= task.end
    order = [f"{kind}{i}" for kind in "FB" for i in range(micro)]
    assert all(in_order(tasks, row) == order for row in range(stages))


@pytest.mark.slow
@pytest.mark.parametrize("micro", [1, 4])
def test_resnet_on_two_devices_equals_the_same_on_one(data, whole, micro):
    split = ModelParallelResNet50(devices(2))
    split.load_state_dict(whole.state_dict())
    loss, _ = micro_batches.take_step(split, *data, micro)
    one_loss, gradients = one_process(copy.deepcopy(whole), *data, micro)
    torch.testing.assert_close(gradients_of(split), gradients, rtol=0, atol=0)
    assert loss == pytest.approx(one_loss, rel=1e-5)
    assert int(split.bn1.num_batches_tracked) == micro
    unsplit_step(whole, *data, micro)
    torch.testing.assert_close(gradients_of(whole), gradients, rtol=0, atol=0)


def test_both_devices_work_at_once_with_micro_batches():
    """Stage 0 in its second forward meets stage 1 in its first."""
    model, both = Stages(), threading.Barrier(2, timeout=10)

    def meet(stage, turn):
        calls = itertools.count(1)

        def wait(*_):
            if next(calls) == turn:
                both.wait()

        model.stages[stage].register_forward_pre_hook(wait)

    meet(0, turn=2)
    meet(1, turn=1)
    micro_batches.take_step(model, *batch(), 4)


def test_what_a_backward_has_used_is_freed():
    """When a stage is at its backward i, nothing is left of the micro-batches before i."""
    model, alive = Stages(3), []
    outputs = {stage: [] for stage in model.stages}  # weak references

    def remember(stage, _, output):
        earlier = list(outputs[stage])
        outputs[stage].append(weakref.ref(output))
        output.register_hook(lambda _: alive.extend(one() is not None for one in earlier))

    for stage in model.stages:
        stage.register_forward_hook(remember)
    micro_batches.take_step(model, *batch(), 4)
    assert alive == [False] * (3 * (1 + 2 + 3))


@given(size=some.integers(1, 12), micro=some.integers(-1, 13))
def test_a_batch_is_split_into_equal_micro_batches_or_refused(size, micro):
    images, labels = batch(size)
    divisors = [m for m in range(1, size + 1) if size % m == 0]
    if micro not in divisors:
        with pytest.raises(ValueError, match=f"Use {', '.join(map(str, divisors))}\\."):
            micro_batches.split(images, labels, micro)
        return
    parts = micro_batches.split(images, labels, micro)
    assert [len(x) for x, _ in parts] == [len(y) for _, y in parts] == [size // micro] * micro
    assert torch.equal(torch.cat([x for x, _ in parts]), images)
    assert torch.equal(torch.cat([y for _, y in parts]), labels)


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_in_a_stage_comes_out_and_nothing_hangs(broken):
    model = Stages()
    model.stages[broken] = torch.nn.Linear(7, 7)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        micro_batches.take_step(model, *batch(), 2)
