"""Micro-batches in one process: the mean loss, nothing kept too long, and errors come out."""

import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from mgpu_tutorial.model_parallel import micro_batches
from tests.model_parallel.reference import equal_stacks, one_process


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


@pytest.mark.parametrize("stages, micro", [(1, 2), (3, 4), (4, 1)])
def test_a_step_is_that_of_one_process(stages, micro):
    _, gradients = one_process(Stages(stages), *batch(), micro)
    model = Stages(stages)
    tasks = micro_batches.take_step(model, *batch(), micro)
    found = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(found, gradients, rtol=0, atol=0)
    ends = {(t.kind, t.stage, t.micro): t.end for t in tasks}
    assert len(ends) == len(tasks) == 2 * stages * micro
    for task in tasks:
        neighbour = task.stage - 1 if task.kind == "F" else task.stage + 1
        earlier = ends.get((task.kind, neighbour, task.micro), 0.0)
        assert task.row == task.stage and earlier <= task.begin <= task.end


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


@given(size=some.integers(1, 12), micro=some.integers(1, 13))
def test_a_batch_is_split_into_equal_micro_batches_or_refused(size, micro):
    images, labels = batch(size)
    if size % micro:
        with pytest.raises(RuntimeError, match="don't multiply up to the size of dim 0"):
            micro_batches.MicroBatchStep(Stages(), images, labels, micro)
        return
    parts = micro_batches.MicroBatchStep(Stages(), images, labels, micro).parts
    xs, ys = zip(*parts, strict=True)
    assert [len(x) for x in xs] == [size // micro] * micro
    assert torch.equal(torch.cat(xs), images) and torch.equal(torch.cat(ys), labels)


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_in_a_stage_comes_out_and_nothing_hangs(broken):
    model = Stages()
    model.stages[broken] = torch.nn.Linear(7, 7)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        micro_batches.take_step(model, *batch(), 2)
