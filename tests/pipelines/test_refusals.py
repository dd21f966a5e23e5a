"""What a pipeline cannot do is refused on every rank; what it can is as one process."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining as pp
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.pipelines import figures, llama, schedules, stages
from mgpu_tutorial.pipelines.work import Pauses, ResNetStages
from mgpu_tutorial.shared import small_and_large as sizes
from tests.pipelines.linear_stages import LinearStages


def orders_of(*orders):
    """A function that gives each rank its order, written "F0 B0"."""
    return lambda rank, ranks, micro: orders[rank].split()


def in_order(*orders):
    return stages.run_in_order, Pauses(0.0), 2, orders_of(*orders), stages.isend


def by_1f1b(rank, world_size, work, micro):
    stages.run_in_order(rank, world_size, work, micro, stages.order_of_1f1b, stages.isend)


def order_for(rank, world_size, *given):
    stages.order_of_1f1b(*given)


class Halves(LinearStages):
    def shape(self, index, micro):
        return super().shape(index, int(micro))


FIRST = "F0 F1 B0 B1"


@pytest.mark.parametrize(
    "count, words, call",
    [
        (
            2,
            "into 5 equal micro-batches, and the mean",
            (stages.run_gpipe, LinearStages(2), 5),
        ),
        (2, "does not divide into 2.0", (stages.run_gpipe, Halves(2), 2.0)),
        (2, "What fits: [1, 2, 3, 4, 6, 12]", (stages.run_gpipe, LinearStages(2), 13)),
        (2, "into 0 equal micro-batches", (stages.run_gpipe, Pauses(0.0), 0)),
        (2, "a batch of 4 does not divide into 3", (stages.run_gpipe, ResNetStages(), 3)),
        (3, "2 stages and needs 2 ranks, got 3", (stages.run_gpipe, ResNetStages(), 4)),
        (1, "2 stages and needs 2 ranks, got 1", (stages.run_gpipe, ResNetStages(), 4)),
        (2, "a rank from 0 to 1 and one micro-batch or more", (order_for, 5, 2, 3)),
        (2, "got rank -1 and 3", (order_for, -1, 2, 3)),
        (2, "got rank 0 and 0", (order_for, 0, 2, 0)),
        (2, "rank 1 must do each of 2 micro-batches", in_order(FIRST, "F0 B0 F1")),
        (2, "its order is F0 B0 F1 B1 B1", in_order(FIRST, "F0 B0 F1 B1 B1")),
        (2, "rank 0 must do each of 2", in_order("B0 F0 F1 B1", FIRST)),
        (2, "does B0 B1 and rank 1 does B1 B0", in_order(FIRST, "F0 F1 B1 B0")),
        (2, "does F0 F1 and rank 1 does F1 F0", in_order(FIRST, "F1 F0 B0 B1")),
    ],
)
def test_it_is_refused_on_every_rank(refused, count, words, call):
    refused(count, words, *call)


@pytest.mark.parametrize("run", [stages.run_gpipe, by_1f1b])
def test_a_model_that_nobody_has_cut_is_refused(refused, run):
    words = "Sequential has no module, shape, batch, loss: give a Work"
    refused(2, words, run, nn.Sequential(nn.Linear(4, 4)), 2)


@pytest.mark.parametrize("run", [stages.run_gpipe, by_1f1b])
def test_the_class_of_a_work_is_none(refused, run):
    refused(2, "LinearStages is a class: give one Work", run, LinearStages, 2)


class Differing(LinearStages):
    """Ranks that do not agree: the micro-batches, the dtype, the inputs, the targets."""

    def __init__(self, what):
        super().__init__(2)
        self.what = what

    def shape(self, index, micro):
        wide = self.what == "shapes" and dist.get_rank() == 1
        return [*super().shape(index, micro), 1] if wide else super().shape(index, micro)

    def batch(self, micro):
        x, y = super().batch(micro)
        if dist.get_rank() == 1:
            x = x + (self.what == "inputs")
            y = y.flip(0) if self.what == "targets" else y
        return x, y


def disagree(rank, world_size, what):
    torch.set_default_dtype([torch.float64, torch.float32][what == "dtype" and rank])
    micro = 2 + (what == "micro" and rank)
    stages.run_gpipe(rank, world_size, Differing(what), micro)


@pytest.mark.parametrize(
    "what, words",
    [
        ("micro", "micro-batches: 2 on rank 0 and 3 on rank 1, but all ranks must"),
        ("dtype", "dtype: torch.float64 on rank 0 and torch.float32 on rank 1"),
        ("inputs", "batch: "),
        ("targets", "batch: "),
        ("shapes", "shapes: "),
    ],
)
def test_ranks_that_do_not_agree_are_refused(refused, what, words):
    """gloo moves bytes: a message of other numbers, or of another batch, is taken."""
    refused(2, words, disagree, what, sent=True)


class Weighed(LinearStages):
    """A loss whose mean does not divide by the samples; batches of four classes."""

    def __init__(self, **how):
        super().__init__(2)
        self.loss = partial(cross_entropy, **how)


@pytest.mark.parametrize(
    "how",
    [
        {"ignore_index": 0, "reduction": "sum"},
        {"reduction": "sum"},
        {"weight": torch.arange(1.0, 5.0)},
    ],
)
@pytest.mark.parametrize("micro", [2, 4, 12])
def test_a_loss_that_is_no_mean_of_samples_is_refused(refused, how, micro):
    words = f"the mean of its {micro} micro-batches"
    refused(2, words, by_gpipe, Weighed(**how), micro, sent=True)


def by_gpipe(rank, world_size, work, micro):
    return stages.run_gpipe(rank, world_size, work, micro)


def by_schedule(rank, world_size, work, micro):
    schedules.run_schedule(rank, world_size, work, micro, pp.ScheduleGPipe)


def test_pytorchs_schedules_ask_for_a_mean_and_for_equal_parts_too(refused):
    refused(2, "the mean of its 4 micro-batches", by_schedule, Weighed(reduction="sum"), 4)
    refused(2, "into 5 equal micro-batches, and the mean", by_schedule, LinearStages(2), 5)
    words = "Sequential has no module, shape, batch, loss: give a Work"
    refused(2, words, by_schedule, nn.Sequential(nn.Linear(4, 4)), 2)


def test_an_ignored_class_of_which_parts_have_unequally_many_is_refused(refused):
    refused(2, "without weight", by_gpipe, Weighed(ignore_index=0), 12, sent=True)


@pytest.mark.parametrize("schedule", [pp.ScheduleGPipe, pp.ScheduleZBVZeroBubble])
@pytest.mark.parametrize("rank, count", [(5, 2), (2, 2), (-1, 2), (0.5, 2), (0, 0)])
def test_a_rank_that_is_not_there_has_no_stages(schedule, rank, count):
    with pytest.raises(ValueError, match=f"there is no rank {rank} of {count}: they count"):
        schedules.stages_on_rank(schedule, rank, count)


class Other(LinearStages):
    """Float64 on ranks that expect float32, or an output of another shape."""

    def __init__(self, count, shape=None):
        super().__init__(count)
        self.other = shape

    def shape(self, index, micro):
        return self.other or super().shape(index, micro)


@pytest.mark.parametrize(
    "work, words",
    [
        (Other(2), r"\(6, 4\) of torch.float64, .* \(6, 4\), .* the default torch.float32"),
        (Other(2, [4, 6]), r"the output is \(6, 4\) .* expects \(4, 6\), as work.shape says"),
        (Other(2, [8, 4]), r"the output is \(6, 4\) .* expects \(8, 4\)"),
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
    torch.set_default_dtype(work.dtype)  # of what is received; in this rank only
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
def test_messages_have_the_default_dtype(ranks, dtype):
    found = ranks(2, gradients, Special(2, "", dtype), 2, "gpipe").results
    expected = ranks(2, gradients, Special(2, ""), 2, "gpipe").results
    for own, precise in zip(found, expected, strict=True):
        for a, b in zip(own, precise, strict=True):
            assert a.dtype == dtype and (a - b).norm() < 0.03 * b.norm()


def held(rank, world_size):
    stage, kept = stages.Stage(Pauses(0.0), 2), []
    for step in stages.forward_step, stages.backward_step:
        for i in range(2):
            step(stage, i, None)
            kept.append(sorted(stage.waiting))
    return kept


def test_a_stage_lets_go_of_a_micro_batch_with_its_backward(ranks):
    assert ranks(1, held).results == [[[0], [0, 1], [1], []]]


def by_the_global_rank(rank, world_size):
    group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    stages.run_gpipe(rank, world_size, LinearStages(2), 2, group)


def test_the_rank_is_that_within_the_group(refused):
    """Rank 2 of the world is 1 in its group: it would wait for itself."""
    refused(4, "within the group", by_the_global_rank, sent=True)


class InPlace(LinearStages):
    """The second stage begins with a layer that overwrites what it receives, or ends so."""

    def __init__(self, place):
        super().__init__(2)
        self.stacks[1].insert(place, nn.Sequential(nn.ReLU(inplace=True)))


@pytest.mark.parametrize("run", [stages.run_gpipe, by_1f1b])
def test_a_stage_that_begins_in_place_is_refused(refused, run):
    words = "stage 1 begins with ReLU(inplace=True), which would overwrite what it receives"
    refused(2, words, run, InPlace(0), 2, sent=True)


def test_a_stage_may_work_in_place_later(ranks):
    def run(rank, world_size):
        torch.set_default_dtype(torch.float64)
        return stages.run_gpipe(rank, world_size, InPlace(1), 2)[0]

    assert len(ranks(2, run).results[1]) == 2


def cut_llama(rank, world_size, layers):
    what = stages.run_gpipe, layers, sizes.small, sizes.SMALL
    llama.train_stages(rank, world_size, *what)


@pytest.mark.parametrize("layers", [[1, 2], [1, 0], [3, -1]])
def test_layers_that_the_model_does_not_have_are_refused(refused, layers):
    words = f"stages of {layers} layers are {sum(layers)}, and the model has 2"
    refused(2, words, cut_llama, layers)


@pytest.mark.parametrize("layers", [[2], [1, 1, 0]])
def test_a_stage_for_each_rank_is_asked_for(refused, layers):
    refused(2, f"{len(layers)} stages need {len(layers)} ranks, got 2", cut_llama, layers)


@pytest.mark.parametrize(
    "orders, words",
    [
        (["F0 I0 W0", "I0 F0 W0"], "rank 0 never comes to I0 W0: what I0 needs"),
        (["B0 F0"], "rank 0 never comes to B0 F0"),
        (["F0 B1 F1 B0", "F0 B0 F1 B1"], "rank 0 never comes to B1 F1 B0"),
        (["F0 W0 I0"], "rank 0 never comes to W0 I0"),
        (["F0 B0", "F0"], "rank 1 must name each micro-batch once as F, and as B, or as I"),
        (["F0 I0"], "its order is F0 I0"),
        (["F0 F0 B0 B0"], "its order is F0 F0 B0 B0"),
        (["F0 B0 W0"], "its order is F0 B0 W0"),
    ],
)
def test_an_order_that_never_ends_is_refused(orders, words):
    with pytest.raises(ValueError, match=words):
        figures.tasks_in([order.split() for order in orders])
