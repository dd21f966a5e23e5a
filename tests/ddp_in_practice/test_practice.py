"""Around the training loop: each mistake gives its error, each cure works."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_in_practice import practice

# Accumulation


def where_no_sync_stands(rank, world_size, around_forward, around_backward):
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    with model.no_sync() if around_forward else nullcontext():
        output = model(torch.full((1, 1), 1.0 + rank)).sum()
    with model.no_sync() if around_backward else nullcontext():
        output.backward()
    return model.module.weight.grad.item()


@pytest.mark.parametrize("around_backward", [False, True])
@pytest.mark.parametrize("around_forward, gradients", [(False, [1.5, 1.5]), (True, [1, 2])])
def test_the_forward_decides_whether_backward_sends(
    ranks, around_forward, around_backward, gradients
):
    report = ranks(2, where_no_sync_stands, around_forward, around_backward)
    assert report.results == gradients


# Uneven batches


def learn_while_joined(rank, world_size, **options):
    """The gradients of 1, the weight after the loop and after join(), and the momentum."""
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    nn.init.zeros_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    gradients = []
    with model.join(**options):
        for _ in range(5 - 2 * rank):
            optimizer.zero_grad()
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            gradients.append(model.module.weight.grad.item())
        inside = model.module.weight.item()
    momentum = optimizer.state[model.module.weight]["momentum_buffer"].item()
    return gradients, inside, model.module.weight.item(), momentum


def test_join_hands_on_the_last_ranks_parameters_and_not_its_optimizer(ranks):
    first, second = ranks(2, learn_while_joined).results
    assert first == ([1.0, 1.0, 1.0, 0.5, 0.5], -6.8125, -6.8125, 1.1875)
    assert second == ([1.0, 1.0, 1.0], -4.25, -6.8125, 1.75)


def test_join_can_divide_by_the_ranks_that_are_left(ranks):
    report = ranks(2, learn_while_joined, divide_by_initial_world_size=False)
    assert [gradients for gradients, *_ in report.results] == [[1.0] * 5, [1.0] * 3]


# The trace of a step


def test_the_profiler_sees_six_transfers_and_the_first_under_backward(ranks, tmp_path):
    folder = str(tmp_path)
    ranks(2, practice.profile_step, folder)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0.json", "rank1.json"]
    for rank in (0, 1):
        sent = practice.read_trace(folder, rank, "gloo:all_reduce")
        assert len(sent) == len(practice.read_trace(folder, rank, "c10d::allreduce_")) == 6
        accumulated = practice.read_trace(folder, rank, "torch::autograd::AccumulateGrad")
        copied = practice.read_trace(folder, rank, "torch::distributed::reducer::mul_out")
        assert len(accumulated) == len(copied) == 14
        assert min(sent)[0] < max(accumulated)[0]


def test_the_rank_that_is_late_has_the_short_call(ranks, tmp_path):
    ranks(2, practice.profile_step, str(tmp_path), late=0.3)
    calls = [min(practice.read_trace(str(tmp_path), r, "gloo:all_reduce")) for r in (0, 1)]
    on_time, late = (end - begin for begin, end in calls)
    assert late < on_time < 10_000  # milliseconds


INTERVALS = st.lists(st.tuples(st.integers(-10, 20), st.integers(0, 9)), max_size=8)


@given(INTERVALS)
def test_the_union_counts_each_moment_once(starts_and_lengths):
    intervals = [(begin, begin + length) for begin, length in starts_and_lengths]
    covered = {moment for begin, end in intervals for moment in range(begin, end)}
    assert practice.union_length(intervals) == len(covered)
