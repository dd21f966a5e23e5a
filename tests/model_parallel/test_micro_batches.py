"""Micro-batches in one process: the same gradients, in order, and nothing kept too long."""

import threading
import weakref

import pytest
import torch

from mgpu_tutorial.lab import devices, idle_share, in_order
from mgpu_tutorial.lab.record.pipeline_steps import Task
from mgpu_tutorial.model_parallel import measurements, micro_batches
from mgpu_tutorial.model_parallel import split_resnet as resnet
from tests.model_parallel.reference import equal_stacks, gradients_of


@pytest.mark.parametrize("micro", [1, 4])
def test_micro_batches_on_two_devices_equal_the_same_on_one(data, weights, expected, micro):
    with torch.device("meta"):
        model = resnet.ModelParallelResNet50(devices(2))
    model.load_state_dict(weights)
    loss, tasks = micro_batches.forward_backward(model, *data, micro)
    one_loss, one = expected(micro)
    torch.testing.assert_close(gradients_of(model), one, rtol=0, atol=0)
    assert loss == pytest.approx(one_loss, rel=1e-5)
    assert int(model.bn1.num_batches_tracked) == micro
    for device in (0, 1):
        order = [f"F{i}" for i in range(micro)] + [f"B{i}" for i in range(micro)]
        assert in_order(tasks, device) == order


def test_batchnorm_sees_the_pieces_and_other_networks_the_batch(data, expected):
    found = {}
    for micro in (1, 4):
        torch.manual_seed(0)
        model = micro_batches.ConvStack(devices(2))
        micro_batches.forward_backward(model, *data, micro)
        found[micro] = gradients_of(model)
    torch.testing.assert_close(found[1], found[4], rtol=1e-3, atol=1e-6)
    with pytest.raises(AssertionError):  # of ResNet-50, which the stages equal bit by bit
        torch.testing.assert_close(expected(1)[1], expected(4)[1], rtol=0.1, atol=1e-2)


class Stages(torch.nn.Module):
    """Linear stages on the CPU, as `forward_backward` wants them."""

    def __init__(self, count=2):
        super().__init__()
        self.stages = equal_stacks(1, 4, count)
        self.layers = torch.nn.ModuleList(self.stages)  # a list hides its parameters
        self.devices = [torch.device("cpu")] * count


def batch(size=8):
    return torch.linspace(-1, 1, 4 * size).view(size, 4), torch.arange(size) % 4


def test_two_devices_never_work_at_once_without_micro_batches(data):
    _, tasks = micro_batches.forward_backward(
        micro_batches.ConvStack(("cpu", "cpu")), *data, 1
    )
    assert idle_share(tasks) > 0.49
    first, second = ([t for t in tasks if t.row == row] for row in (0, 1))
    assert not any(a.begin < b.end and b.begin < a.end for a in first for b in second)


def test_both_devices_work_at_once_with_micro_batches():
    """Stage 0 does not end its second forward before stage 1 has begun its first."""
    model, begun, calls = Stages(), threading.Event(), []

    def wait(*_):
        calls.append(len(calls))
        assert len(calls) < 2 or begun.wait(30), "stage 1 did not begin meanwhile"

    model.stages[0].register_forward_pre_hook(wait)
    model.stages[1].register_forward_pre_hook(lambda *_: begun.set())
    micro_batches.forward_backward(model, *batch(), 4)
    assert len(calls) == 4


def test_what_a_backward_has_used_is_freed():
    """When a stage is at its backward i, nothing is left of the micro-batches before i."""
    model, alive = Stages(3), {}
    kept = {stage: [] for stage in range(3)}  # weak references to inputs and outputs

    def remember(stage, inputs, output):
        i = len(kept[stage])
        kept[stage].append((weakref.ref(inputs[0]), weakref.ref(output)))

        def look(_):
            found = [ref() is not None for pair in kept[stage][:i] for ref in pair]
            alive[stage, i] = sum(found[stage == 0 :: 1 + (stage == 0)])

        output.register_hook(look)

    for stage, module in enumerate(model.stages):
        module.register_forward_hook(
            lambda _, inputs, output, stage=stage: remember(stage, inputs, output)
        )
    micro_batches.forward_backward(model, *batch(), 4)
    assert alive == {(stage, i): 0 for stage in range(3) for i in range(4)}


@pytest.mark.parametrize("micro", [0, 3, 5, 8])
def test_a_batch_that_does_not_divide_is_refused(data, micro):
    model = micro_batches.ConvStack(("cpu", "cpu"))
    with pytest.raises(ValueError, match="does not divide .* Use 1, 2, 4"):
        micro_batches.forward_backward(model, *data, micro)


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_in_a_stage_comes_out_and_nothing_hangs(broken):
    model = Stages()
    model.stages[broken] = torch.nn.Linear(7, 7)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        micro_batches.forward_backward(model, *batch(), 2)


def test_an_error_in_a_backward_comes_out():
    model = Stages()

    def refuse(*_):
        raise RuntimeError("no gradient today")

    model.stages[1].register_full_backward_hook(refuse)
    with pytest.raises(RuntimeError, match="no gradient today"):
        micro_batches.forward_backward(model, *batch(), 2)


def test_a_sweep_measures_each_setting_in_turns(monkeypatch):
    model, turns = Stages(), []

    def step(model, images, labels, micro):
        mine = [p for stage in model.stages for p in stage.parameters()]
        assert all(p.grad is None for p in mine), "the gradients of the step before"
        for parameter in mine:
            parameter.grad = torch.ones_like(parameter)
        turns.append(micro)
        begin = 100.0 * len(turns)
        return 0.0, [
            Task(0, 0, "F", 0, begin, begin + 1),
            Task(1, 1, "B", 0, begin, begin + micro),
        ]

    monkeypatch.setattr(measurements, "forward_backward", step)
    times = measurements.sweep(model, *batch(), (2, 4, 8), repeats=2)
    assert turns == [2, 4, 8, 2, 4, 8]
    assert times == {2: [2.0, 2.0], 4: [4.0, 4.0], 8: [8.0, 8.0]}
