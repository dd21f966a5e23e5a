"""Micro-batches in one process: the same gradients, in order, and nothing kept too long."""

import threading
import weakref

import pytest
import torch

from mgpu_tutorial.lab import devices, idle_share, in_order
from mgpu_tutorial.lab.record.pipeline_steps import Task
from mgpu_tutorial.model_parallel import measurements, micro_batches
from mgpu_tutorial.model_parallel import split_resnet as resnet
from tests.model_parallel.reference import assert_same, equal_stacks, gradients_of
from tests.thorough import again, thorough


@pytest.mark.parametrize("micro", [again(1), again(2), again(4)])
def test_micro_batches_on_two_devices_equal_the_same_on_one(data, weights, expected, micro):
    with torch.device("meta"):
        model = resnet.ModelParallelResNet50(devices(2))
    model.load_state_dict(weights)
    loss, tasks = micro_batches.forward_backward(model, *data, micro)
    one_loss, one = expected(micro)
    assert_same(gradients_of(model), one)
    assert loss == pytest.approx(one_loss, rel=1e-5)
    assert int(model.bn1.num_batches_tracked) == micro
    for device in (0, 1):
        order = [f"F{i}" for i in range(micro)] + [f"B{i}" for i in range(micro)]
        assert in_order(tasks, device) == order


@thorough
def test_batchnorm_sees_the_pieces_and_other_networks_the_batch(expected):
    found = {}
    for micro in (1, 4):
        model = Stages()
        micro_batches.forward_backward(model, *batch(), micro)
        found[micro] = gradients_of(model)
    torch.testing.assert_close(found[1], found[4], rtol=1e-4, atol=1e-6)
    with pytest.raises(AssertionError):  # of ResNet-50, which the stages equal bit by bit
        torch.testing.assert_close(expected(1)[1], expected(2)[1], rtol=0.1, atol=1e-2)


class Stages(torch.nn.Module):
    """Linear stages on the CPU, as `forward_backward` wants them."""

    def __init__(self, count=2):
        super().__init__()
        self.stages = equal_stacks(1, 4, count)
        self.layers = torch.nn.ModuleList(self.stages)  # a list hides its parameters
        self.devices = [torch.device("cpu")] * count


def batch(size=8):
    return torch.linspace(-1, 1, 4 * size).view(size, 4), torch.arange(size) % 4


def test_two_devices_never_work_at_once_without_micro_batches():
    _, tasks = micro_batches.forward_backward(Stages(), *batch(), 1)
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
def test_a_batch_that_does_not_divide_is_refused(micro):
    with pytest.raises(ValueError, match="does not divide .* Use 1, 2, 4"):
        micro_batches.forward_backward(Stages(), *batch(4), micro)


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


def test_steps_are_taken_in_turns_and_the_least_work_counts(monkeypatch):
    model, turns = Stages(), []

    def step(model, images, labels, micro):
        mine = [p for stage in model.stages for p in stage.parameters()]
        assert all(p.grad is None for p in mine), "the gradients of the step before"
        for parameter in mine:
            parameter.grad = torch.ones_like(parameter)
        turns.append(micro)
        return [Task(0, 0, "F", 0, 1.0, 10.0 - len(turns) + 0.1 * micro)]

    monkeypatch.setattr(measurements, "step_alone", step)
    found = measurements.steps_alone(model, *batch(), (2, 4, 8), repeats=2)
    assert turns == [2, 4, 8, 2, 4, 8]
    assert {micro: tasks[0].end for micro, tasks in found.items()} == {
        2: pytest.approx(6.2),  # the fourth of the steps
        4: pytest.approx(5.4),
        8: pytest.approx(4.8),
    }


@pytest.mark.parametrize("micro", [1, 4])
def test_a_step_alone_computes_what_the_devices_do(micro):
    found = []
    for step in (micro_batches.forward_backward, measurements.step_alone):
        model = Stages(3)
        result = step(model, *batch(), micro)
        tasks = result if step is measurements.step_alone else result[1]
        found.append(gradients_of(model))
        for row in range(3):
            order = [f"F{i}" for i in range(micro)] + [f"B{i}" for i in range(micro)]
            assert in_order(tasks, row) == order
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_tasks_begin_when_their_row_is_free_and_what_they_wait_for_is_done():
    """Two stages, two micro-batches; stage 1 takes longer. By hand, in seconds."""

    def task(kind, stage, micro, seconds):
        return Task(stage, stage, kind, micro, 50.0, 50.0 + seconds)

    forwards = [task("F", s, i, 1.0 + s) for i in (0, 1) for s in (0, 1)]
    backwards = [task("B", s, i, 2.0) for i in (0, 1) for s in (1, 0)]
    laid = measurements.lay_out(forwards + backwards)
    times = {(t.kind, t.stage, t.micro): (t.begin, t.end) for t in laid}
    assert times == {
        ("F", 0, 0): (0, 1), ("F", 1, 0): (1, 3), ("F", 0, 1): (1, 2), ("F", 1, 1): (3, 5),
        ("B", 1, 0): (5, 7), ("B", 0, 0): (7, 9), ("B", 1, 1): (7, 9), ("B", 0, 1): (9, 11),
    }  # fmt: skip
    assert measurements.work_seconds(laid) == pytest.approx(14)
    table = measurements.step_table({"small": {2: laid}})
    assert table.rows == [["small", 2, 6000, 8000, 14000 / 4 * 3, 11000]]
