"""The wrappers: equal to one process and to torch's DDP, and when they communicate."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.experiments import (
    WRAPPERS,
    Setting,
    Tower,
    finish_gradient_synchronization,
    shares,
    wrap,
)
from mgpu_tutorial.ddp_buckets.figures import count_calls, record_steps
from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP, NaiveDDP, into_buckets
from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.intervals import events_of

by_name = pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.__name__)


def train(rank, world_size, wrapper, kind, cap=0.02, set_to_none=True):
    """Three steps on this rank's shares; the wrapper None is one process without a wrapper.

    Returns the gradients, and the parameters.
    """
    torch.manual_seed(rank)  # another start on each rank: rank 0's must win
    plain = Tower()
    if kind == "frozen":
        plain.body[1].requires_grad_(False)
    if kind == "tied":
        plain.body[3].weight = plain.body[2].weight
    model = wrap(wrapper, plain, cap) if wrapper else plain
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    for batch in shares(rank, world_size, 3, 64):
        optimizer.zero_grad(set_to_none=set_to_none)
        model(batch).square().mean().backward()
        if wrapper:
            finish_gradient_synchronization(model)
        optimizer.step()
    return [p.grad for p in trained], plain.state_dict()


VARIANTS = [
    {"kind": "plain", "cap": 25.0},
    {"kind": "plain", "cap": 0},
    {"kind": "frozen"},
    {"kind": "tied", "cap": 0.008},
    {"kind": "tied", "set_to_none": False},
]


@by_name
@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_three_steps_equal_one_process(ranks, wrapper, settings):
    alone = train(0, 1, None, **settings)
    for world_size in (1, 3):
        results = ranks(world_size, train, wrapper, **settings).results
        for trained in results:
            torch.testing.assert_close(trained, alone)
            assert largest_difference(trained, results[0]) == 0


# When they communicate

PARAMETERS, WEIGHTS = 14, 6
NBYTES = 4 * (6 * (128 * 128 + 128) + 128 * 10 + 10)
CALLS = {  # how many, and how many of them begin during backward
    NaiveDDP: (PARAMETERS, 0),
    BucketedDDP: (WEIGHTS + 1, WEIGHTS + 1),  # the head, which is defined first, alone
    DistributedDataParallel: (WEIGHTS, WEIGHTS),
}


@by_name
def test_each_wrapper_makes_its_calls_at_its_time(ranks, wrapper):
    a_weight = Setting(width=128, batch=4), 1 / 16  # to a bucket
    report = ranks(2, record_steps, wrapper, *a_weight, trace=True)
    for step in ("step 1", "step 2"):
        assert count_calls(report, step) == (*CALLS[wrapper], NBYTES)
        events = events_of(report, step)
        assert {e.op for e in events if e.kind == "collective"} == {"all_reduce"}
        assert not [e for e in events if e.kind == "wait"]  # what is sent has arrived
        ends = {e.rank: e.end for e in report.events if e.note == step}
        sent = [e for e in events if e.op == "all_reduce" and e.done]
        assert all(e.end < e.done <= ends[e.rank] for e in sent)


@given(st.lists(st.integers(1, 5)), st.integers(1, 40))
def test_a_bucket_is_closed_once_it_holds_its_size(sizes, cap):
    given = [nn.Parameter(torch.zeros(n)) for n in sizes]
    buckets = into_buckets(given, cap / 2**20)
    assert [id(p) for bucket in buckets for p in bucket] == [*map(id, reversed(given))]
    nbytes = [[4 * len(p) for p in bucket] for bucket in buckets]
    assert all(sum(bucket) >= cap for bucket in nbytes[:-1])
    assert all(sum(bucket[:-1]) < cap for bucket in nbytes)
    assert all(nbytes)


def leave_a_parameter_out(rank, world_size, wrapper):
    """Rank 1 does not use the second layer."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x):
            return self.a(x) + (self.b(x) if rank == 0 else 0)

    model = wrapper(Half())
    model(torch.ones(1, 4)).sum().backward()
    model.finish_gradient_synchronization()


def test_naive_fails_where_a_rank_does_not_use_a_parameter(ranks):
    with pytest.raises(RankFailed, match="rank 1 raised TypeError"):
        ranks(2, leave_a_parameter_out, NaiveDDP, timeout=10)
