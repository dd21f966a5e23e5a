"""What a pipeline cannot do is refused on every rank; what it can is as one process."""

import pytest
import torch
from torch import nn

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.pipelines import figures, llama, stages
from mgpu_tutorial.pipelines.work import Pauses
from mgpu_tutorial.shared import small_and_large as sizes
from tests.pipelines.linear_stages import LinearStages


class InFloat64(Pauses):
    """Says nothing of its dtype."""

    def module(self, index):
        return super().module(index).double()


class Tied(LinearStages):
    """The second stage has a layer of the first, as a head may have an embedding's weight."""

    def __init__(self):
        super().__init__(2)
        self.stages = [self.stacks[0], nn.Sequential(self.stacks[0][0])]


def orders_of(*orders):
    """A function that gives each rank its order, written "F0 B0"."""
    return lambda rank, ranks, micro: orders[rank].split()


def in_order(*orders):
    return stages.run_in_order, Pauses(0.0), 2, orders_of(*orders), stages.isend


FIRST = "F0 F1 B0 B1"


@pytest.mark.parametrize(
    "error, call",
    [
        (ValueError("12 samples", "5 equal"), (stages.run_gpipe, LinearStages(2), 5)),
        (TypeError("Sequential", "Work"), (stages.run_gpipe, nn.Sequential(), 4)),
        (ValueError("float32", "float64", "dtype"), (stages.run_gpipe, InFloat64(0.0), 2)),
        (ValueError("`0.weight`", "stage 1"), (stages.run_gpipe, Tied(), 2)),
        (ValueError("B0 B1", "rank 1 does B1 B0"), in_order(FIRST, "F0 F1 B1 B0")),
        (ValueError("F0 F1", "rank 1 does F1 F0"), in_order(FIRST, "F1 F0 B0 B1")),
        (ValueError("F0 F1", "rank 1 does F0"), in_order(FIRST, "F0 B0 B1")),
    ],
)
def test_it_is_refused_on_every_rank(refused, error, call):
    refused(2, error, *call)


def send_step(rank, world_size, order_of):
    work = Pauses(0.0)
    if order_of is None:
        return stages.run_gpipe(rank, world_size, work, 4)
    return stages.run_in_order(rank, world_size, work, 4, order_of, stages.isend)


@pytest.mark.parametrize("order_of", [None, stages.order_of_1f1b])
def test_four_micro_batches_are_eight_messages_and_no_more(ranks, order_of):
    events = ranks(2, send_step, order_of, trace=True).events
    ops = [event.op.removeprefix("i") for event in events if event.kind != "span"]
    assert sorted(op for op in ops if op != "wait") == ["recv"] * 8 + ["send"] * 8


class Other(LinearStages):
    """Float64 on ranks that expect float32, or an output of another shape."""

    dtype = torch.float32

    def __init__(self, count, shape=None):
        super().__init__(count)
        self.other = shape

    def shape(self, index, micro):
        return self.other or super().shape(index, micro)


@pytest.mark.parametrize(
    "work, words",
    [
        (Other(2), r"ValueError.* \[6, 4\] of torch.float32.* \[6, 4\] of torch.float64"),
        (Other(2, [4, 6]), r"ValueError.* \[4, 6\] .*\[6, 4\]"),
        (Other(2, [8, 4]), r"ValueError.* \[8, 4\] .*\[6, 4\]"),
    ],
)
def test_a_message_that_the_next_rank_does_not_expect_is_refused(ranks, work, words):
    """gloo would take a shorter message, and leave what was in memory in the rest."""
    with pytest.raises(RankFailed, match=words):
        ranks(2, stages.run_gpipe, work, 2, timeout=20)


class Turned(nn.Module):
    """Gives its columns as rows: the same numbers in another order in memory."""

    def forward(self, x):
        return x.flip(0).T.contiguous().T


class Special(LinearStages):
    """The first stage frozen, or without parameters; or outputs that are not contiguous."""

    def __init__(self, count, kind, dtype=torch.float64):
        super().__init__(count)
        if kind == "frozen":
            self.stacks[0].requires_grad_(False)
        if kind == "frozen later":
            self.stacks[-1].requires_grad_(False)
        if kind == "no parameters":
            self.stacks[0] = nn.Sequential(nn.Tanh())
        if kind == "turned":
            for stack in self.stacks:
                stack.append(Turned())
        if kind == "unused":
            self.stacks[-1][1].register_parameter("unused", nn.Parameter(torch.ones(1)))
        self.dtype = dtype
        for stack in self.stacks:
            stack.to(dtype)

    def batch(self, micro):
        x, y = super().batch(micro)
        return x.to(self.dtype), y


def gradients(rank, world_size, work, micro, order):
    if order == "gpipe":
        return stages.run_gpipe(rank, world_size, work, micro)[1]
    given = work, micro, stages.order_of_1f1b, stages.isend
    return stages.run_in_order(rank, world_size, *given)[1]


KINDS = ["", "frozen", "frozen later", "no parameters", "turned", "unused"]


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count, micro", [(2, 1), (3, 2)])
def test_the_gradients_are_those_of_one_process(ranks, count, micro, kind, order):
    found = ranks(count, gradients, Special(count, kind), micro, order).results
    one = Special(count, kind)
    whole, batch = nn.Sequential(*one.stacks), one.batch(micro)
    for x, y in zip(*(part.chunk(micro) for part in batch), strict=True):
        (one.loss(whole(x), y) / micro).backward()
    expected = [[p.grad for p in stack.parameters()] for stack in one.stacks]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_messages_have_the_dtype_of_the_work(ranks, dtype):
    found = ranks(2, gradients, Special(2, "", dtype), 2, "gpipe").results
    expected = ranks(2, gradients, Special(2, ""), 2, "gpipe").results
    for own, precise in zip(found, expected, strict=True):
        for a, b in zip(own, precise, strict=True):
            assert a.dtype == dtype and (a - b).norm() < 0.03 * b.norm()


class SomeIgnored(LinearStages):
    """Of twelve labels eight count, six of them in the first half."""

    def batch(self, micro):
        x, y = super().batch(micro)
        return x, y.masked_fill(torch.arange(12) > 7, -100)


def test_the_mean_is_over_the_labels_that_count_in_the_whole_batch(ranks):
    found = ranks(2, stages.run_gpipe, SomeIgnored(2), 2).results
    one = SomeIgnored(2)
    x, y = one.batch(2)
    loss = one.loss(nn.Sequential(*one.stacks)(x), y)
    loss.backward()
    expected = [[p.grad for p in stack.parameters()] for stack in one.stacks]
    torch.testing.assert_close([g for _, g in found], expected, rtol=0, atol=1e-12)
    assert sum(found[1][0]).item() == pytest.approx(loss.item(), abs=1e-12)


def held(rank, world_size):
    stage, kept = stages.Stage(Pauses(0.0), 2), []
    for step in stages.forward_step, stages.backward_step:
        for i in range(2):
            step(stage, i, None)
            kept.append(sorted(stage.waiting))
    return kept


def test_a_stage_lets_go_of_a_micro_batch_with_its_backward(ranks):
    assert ranks(1, held).results == [[[0], [0, 1], [1], []]]


class InPlace(LinearStages):
    """The second stage has a layer that overwrites what it gets."""

    def __init__(self):
        super().__init__(2)
        self.stacks[1].insert(1, nn.Sequential(nn.ReLU(inplace=True)))


def test_a_stage_may_work_in_place_later(ranks):
    assert len(ranks(2, stages.run_gpipe, InPlace(), 2).results[1][0]) == 2


def cut_llama(rank, world_size, layers):
    what = stages.run_gpipe, layers, sizes.small, sizes.SMALL
    llama.train_stages(rank, world_size, *what)


@pytest.mark.parametrize("layers", [[1, 2], [1, 0], [3, -1]])
def test_layers_that_the_model_does_not_have_are_refused(refused, layers):
    refused(2, ValueError(str(layers)), cut_llama, layers)


@pytest.mark.parametrize("layers", [[2], [1, 1, 0]])
def test_a_stage_for_each_rank_is_asked_for(refused, layers):
    refused(2, ValueError(f"{len(layers)} stages"), cut_llama, layers)


@pytest.mark.parametrize(
    "orders, words",
    [
        (["F0 I0 W0", "I0 F0 W0"], "rank 0 .*I0 W0"),
        (["B0 F0"], "rank 0 .*B0 F0"),
        (["F0 B1 F1 B0", "F0 B0 F1 B1"], "rank 0 .*B1 F1 B0"),
        (["F0 W0 I0"], "rank 0 .*W0 I0"),
        (["F0 B0", "F0"], "rank 1 .*F0"),
        (["F0 I0"], "rank 0 .*F0 I0"),
        (["F0 F0 B0 B0"], "rank 0 .*F0 F0 B0 B0"),
        (["F0 B0 W0"], "rank 0 .*F0 B0 W0"),
    ],
)
def test_an_order_that_never_ends_is_refused(orders, words):
    with pytest.raises(ValueError, match=words):
        figures.tasks_in([order.split() for order in orders])
