"""The wrappers: equal to torch's DDP and to one process, for every odd kind of module."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets import wrappers
from mgpu_tutorial.ddp_buckets.experiments import Setting, Tower, shares
from mgpu_tutorial.ddp_buckets.figures import Calls, count_calls, record_steps
from mgpu_tutorial.ddp_buckets.wrappers import (
    WRAPPERS,
    BucketedDDP,
    OverlappedDDP,
    calling_from_python,
    finish_gradient_synchronization,
    wrap,
)
from mgpu_tutorial.ddp_reducer.reducer import note_buckets
from mgpu_tutorial.lab import RankFailed, span
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.intervals import events_of

OURS = WRAPPERS[:4]
by_name = pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.__name__)


# Equal to one process, and to torch


class Mixed(nn.Module):
    """Layers of float32, float64 and bfloat16, one after the other."""

    def __init__(self):
        super().__init__()
        self.kinds = [torch.float32, torch.float64, torch.bfloat16, torch.float64]
        self.layers = nn.ModuleList(nn.Linear(64, 64, dtype=kind) for kind in self.kinds)

    def forward(self, x):
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            x = torch.tanh(layer(x.to(kind)))
        return x.float()


def new_module(kind):
    """A module whose values depend on the caller's seed."""
    if kind == "mixed":
        return Mixed()
    if kind == "norm":
        return nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    tower = Tower()
    if kind == "frozen":
        tower.body[1].requires_grad_(False)
    if kind == "tied":
        tower.body[3].weight = tower.body[2].weight
    return tower


def train(rank, world_size, wrapper, kind="plain", cap=0.02, set_to_none=True, micro=1):
    """Three steps on this rank's shares; the wrapper None is one process without a wrapper.

    The first fills one bucket, the second has those of `cap`, the third goes on. Returns
    the gradients, and parameters and buffers.
    """
    torch.manual_seed(rank)  # another start on each rank: rank 0's must win
    plain = new_module(kind)
    model = wrap(wrapper, plain, cap) if wrapper else plain
    trained = [p for p in plain.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.05, momentum=0.9)
    for batch in shares(rank, world_size, 3, 64):
        optimizer.zero_grad(set_to_none=set_to_none)
        for i, part in enumerate(batch.chunk(micro)):
            last = i == micro - 1 or wrapper is None
            with nullcontext() if last else model.no_sync():
                (model(part).square().mean() / micro).backward()
        if wrapper:
            finish_gradient_synchronization(model)
        optimizer.step()
    gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
    return gradients, plain.state_dict()


def train_with_each(rank, world_size, **settings):
    return {w.__name__: train(rank, world_size, w, **settings) for w in WRAPPERS}


VARIANTS = [
    {"kind": "plain"},
    {"kind": "plain", "cap": 25.0},
    {"kind": "plain", "cap": 1e-6},
    {"kind": "frozen"},
    {"kind": "tied", "cap": 0.008},
    {"kind": "mixed"},
    {"kind": "norm"},
    {"kind": "plain", "set_to_none": False},
    {"kind": "plain", "micro": 2},
    {"kind": "tied", "micro": 2, "set_to_none": False},
]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_three_steps_equal_one_process_and_torch(ranks, settings, world_size):
    results = ranks(world_size, train_with_each, **settings).results
    alone = train(0, 1, None, **settings)
    # bfloat16 rounds to 3 digits: a sum in another order is another number.
    loose = {"rtol": 0.05, "atol": 0.02} if settings["kind"] == "mixed" else {}
    for result in results:
        of_torch = result[DistributedDataParallel.__name__]
        for wrapper in OURS:
            trained = result[wrapper.__name__]
            torch.testing.assert_close(trained, of_torch, **loose)
            if settings["kind"] == "norm":  # each rank normalises by its own share
                continue
            torch.testing.assert_close(trained, alone, **loose)
            assert largest_difference(trained, results[0][wrapper.__name__]) == 0


def test_the_baseline_depends_on_its_settings():
    (gradients, state), (_, tied) = train(0, 1, None), train(0, 1, None, "tied")
    assert all(g.abs().max() > 0 for g in gradients.values())
    assert not torch.equal(state["head.weight"], tied["head.weight"])
    assert "body.1.weight" not in train(0, 1, None, "frozen")[0]


# When they communicate

PARAMETERS, WEIGHTS = 14, 6
NBYTES = 4 * (6 * (128 * 128 + 128) + 128 * 10 + 10)
CALLS = {  # how many, and how many of them begin during backward
    wrappers.NaiveDDP: (PARAMETERS, 0),
    wrappers.FlatDDP: (1, 0),
    OverlappedDDP: (PARAMETERS, PARAMETERS),
    BucketedDDP: (WEIGHTS, WEIGHTS),
    DistributedDataParallel: (WEIGHTS, WEIGHTS),
}
ONE_WEIGHT = Setting(width=128, batch=4, bucket_cap_mb=1 / 16)  # to a bucket


@by_name
def test_each_wrapper_makes_its_calls_at_its_time(ranks, wrapper):
    report = ranks(2, record_steps, wrapper, ONE_WEIGHT, trace=True)
    for step in ("step 1", "step 2"):
        assert count_calls(report, step) == (*CALLS[wrapper], NBYTES)
        events = events_of(report, step)
        assert {e.op for e in events if e.kind == "collective"} == {"all_reduce"}
        assert not [e for e in events if e.kind == "wait"]  # what is sent has arrived
        ends = {e.rank: e.end for e in report.events if e.note == step}
        sent = [e for e in events if e.op == "all_reduce" and e.done]
        assert all(e.end < e.done <= ends[e.rank] for e in sent)


def test_the_first_backward_uses_one_bucket(ranks):
    report = ranks(2, record_steps, BucketedDDP, ONE_WEIGHT, trace=True)
    assert count_calls(report, "step 0") == Calls(1, 1, NBYTES)


def accumulate(rank, world_size, wrapper):
    """A batch in three parts: synchronised each time, and only the last time."""
    model = calling_from_python(wrap(wrapper, Tower(), bucket_cap_mb=0.02))
    (batch,) = shares(rank, world_size, 1, width=64)
    for name in ("warm up", "every", "last"):
        model.zero_grad()
        with span(name):
            for i, part in enumerate(batch.chunk(3)):
                quiet = name == "last" and i < 2
                with model.no_sync() if quiet else nullcontext():
                    model(part).square().mean().backward()
                if not quiet:
                    finish_gradient_synchronization(model)


@by_name
def test_no_sync_saves_two_calls_of_three(ranks, wrapper):
    report = ranks(2, accumulate, wrapper, trace=True)
    assert count_calls(report, "every").count == 3 * count_calls(report, "last").count > 0


def leave_no_sync_by_an_error(rank, world_size, wrapper):
    model = wrap(wrapper, nn.Linear(1, 1, bias=False))
    try:
        with model.no_sync():
            raise KeyError
    except KeyError:
        model(torch.full((1, 1), rank + 1.0)).sum().backward()
    finish_gradient_synchronization(model)
    return model.module.weight.grad.item()


@by_name
def test_after_an_error_inside_no_sync_the_ranks_average_again(ranks, wrapper):
    assert ranks(2, leave_no_sync_by_an_error, wrapper).results == [1.5, 1.5]


# Buckets

DTYPES = [torch.float32, torch.float64]
SIZES = st.lists(st.tuples(st.integers(1, 5), st.sampled_from(DTYPES)))


@given(SIZES, st.integers(1, 40))
def test_a_bucket_is_closed_once_it_holds_its_size(sizes, cap):
    given = [nn.Parameter(torch.zeros(n, dtype=dtype)) for n, dtype in sizes]
    place = {p: i for i, p in enumerate(given)}
    buckets = [[place[p] for p in bucket] for bucket in wrappers.into_buckets(given, cap)]
    assert sorted(sum(buckets, [])) == list(range(len(given)))

    def nbytes(bucket):
        return sum(given[i].nbytes for i in bucket)

    closed = [bucket for bucket in buckets if nbytes(bucket) >= cap]
    left = [bucket for bucket in buckets if nbytes(bucket) < cap]
    assert buckets == closed + left
    assert all(nbytes(bucket[:-1]) < cap for bucket in closed)
    assert [bucket[-1] for bucket in closed] == sorted(bucket[-1] for bucket in closed)
    assert [bucket[0] for bucket in left] == sorted(bucket[0] for bucket in left)
    for dtype in DTYPES:
        kinds = [[given[i].dtype for i in bucket] for bucket in buckets]
        whole = [b for b, kind in zip(buckets, kinds, strict=True) if dtype in kind]
        assert sum(whole, []) == [i for i, p in enumerate(given) if p.dtype == dtype]
        assert sum(bucket in left for bucket in whole) <= 1


def cut_buckets(rank, world_size, caps):
    """The names in each bucket after the rebuilding: by cap, ours and torch's."""
    found = {}
    for cap in caps:
        model = BucketedDDP(Tower(48, 7), cap)
        theirs = DistributedDataParallel(Tower(48, 7), bucket_cap_mb=cap)
        seen = note_buckets(theirs)
        for _ in range(2):
            model(torch.ones(1, 48)).sum().backward()
            model.finish_gradient_synchronization()
            theirs(torch.ones(1, 48)).sum().backward()
        ours = [wrappers.parameter_names(model.module, b.views) for b in model.buckets]
        found[cap] = ours, seen[1]
    return found


def test_our_buckets_are_those_of_torch(ranks):
    first = 4 * (10 + 10 * 48 + 48 + 48 * 48)  # bytes of the head and of one layer
    caps = [1e-6, 0.005, 0.01, first / 2**20, 0.03, 25]
    for result in ranks(2, cut_buckets, caps).results:
        for cap, (ours, theirs) in result.items():
            assert ours == theirs, cap
        assert len(result[1e-6][0]) == 16 and len(result[25][0]) == 1


def use_another_order(rank, world_size):
    """Rank 1 uses the layers in another order: all must cut as rank 0 does."""

    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.b(self.a(x)) if rank == 0 else self.a(self.b(x))

    model = BucketedDDP(Either(), 1e-6)
    gradients = []
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        model.finish_gradient_synchronization()
        gradients.append(model.module.a.weight.grad.clone())
    order = [p for bucket in model.buckets for p in bucket.views]
    return wrappers.parameter_names(model.module, order), gradients


def test_rank_0_decides_on_the_order_of_the_buckets(ranks):
    (first, gradients), (second, others) = ranks(2, use_another_order).results
    assert first == second and first[0].startswith("b.")
    torch.testing.assert_close(gradients, others, rtol=0, atol=0)


@pytest.mark.parametrize("cap", [0, -1, float("nan")])
def test_a_bucket_size_must_be_positive(ranks, cap):
    with pytest.raises(RankFailed, match=f"ValueError: bucket_cap_mb must be .*, got {cap}"):
        ranks(1, train, BucketedDDP, cap=cap)


# What a rank leaves out, does twice, or has otherwise


def use_half(rank, world_size, wrapper):
    """Rank 1 leaves the last layer out; returns its gradient, twice."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

        def forward(self, x):
            return self.a(x) + (self.b(x) if rank == 0 else 0)

    model = wrap(wrapper, Half(), 1e-6)
    found = []
    for factor in (1.0, 3.0):  # the second time stale values must not come back
        model.zero_grad()
        model(torch.full((1, 4), factor)).sum().backward()
        finish_gradient_synchronization(model)
        found += model.module.b.weight.grad.tolist()
    return found


@pytest.mark.parametrize("wrapper", [wrappers.NaiveDDP, wrappers.FlatDDP, BucketedDDP])
def test_a_rank_that_does_not_use_a_parameter_counts_as_zero(ranks, wrapper):
    assert ranks(2, use_half, wrapper).results == [[[0.5] * 4, [1.5] * 4]] * 2


def test_overlapped_refuses_a_parameter_without_gradient(ranks):
    says = r"rank 1 raised RuntimeError: no gradient came for b\.weight, b\.bias: each rank"
    with pytest.raises(RankFailed, match=says):
        ranks(2, use_half, OverlappedDDP, timeout=10)


def go_back_twice(rank, world_size, wrapper):
    model = wrap(wrapper, Tower())
    for _ in range(2):
        model(torch.ones(1, 64)).sum().backward()


@pytest.mark.parametrize("wrapper", [OverlappedDDP, BucketedDDP])
def test_a_second_backward_without_finish_is_refused(ranks, wrapper):
    says = r"gradient of head\.(weight|bias) became ready twice: call finish"
    with pytest.raises(RankFailed, match=says):
        ranks(2, go_back_twice, wrapper, timeout=10)


class Tail(Tower):
    def __init__(self):
        super().__init__()
        self.tail = self.head
        del self.head


DIFFERENCES = {
    "width": lambda: Tower(72),
    "depth": lambda: Tower(64, 5),
    "dtype": lambda: Tower().double(),
    "frozen": lambda: Tower().requires_grad_(False),
    "name": Tail,
}


def wrap_with_a_difference(rank, world_size, wrapper, difference, who=(1,)):
    wrap(wrapper, DIFFERENCES[difference]() if rank in who else Tower())


@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.parametrize("wrapper", [wrappers.NaiveDDP, BucketedDDP])
def test_modules_that_differ_are_refused_on_every_rank(ranks, wrapper, difference):
    says = (
        "ranks 0, 1 and 2 raised ValueError: rank 1 has other parameters than rank 0: build"
    )
    with pytest.raises(RankFailed, match=says):
        ranks(3, wrap_with_a_difference, wrapper, difference, timeout=10)


def test_a_module_that_nobody_trains_is_refused(ranks):
    with pytest.raises(RankFailed, match="ValueError: no parameter requires a gradient"):
        ranks(2, wrap_with_a_difference, BucketedDDP, "frozen", who=(0, 1))


# Forward, buffers, checkpoints


def follow_buffers(rank, world_size, wrapper, forwards):
    """The running means after construction and after each forward, of which some are
    averaged, some under no_sync() and some under no_grad()."""
    norm = nn.BatchNorm1d(1)
    norm.running_mean.fill_(float(rank + 5))
    model = wrap(wrapper, norm)
    found = [norm.running_mean.item()]
    around = {"averaged": nullcontext, "no_sync": model.no_sync, "no_grad": torch.no_grad}
    for kind in forwards:
        with around[kind]():
            output = model(torch.full((4, 1), 10.0 * (rank + 1)))
            found.append(norm.running_mean.item())
            if kind != "no_grad":
                output.sum().backward()
        if kind == "averaged":
            finish_gradient_synchronization(model)
    return found


@by_name
def test_buffers_come_from_rank_0_only_after_a_forward_that_was_averaged(ranks, wrapper):
    # A running mean m becomes 0.9 m + 0.1 x, with x = 10 on rank 0 and 20 on rank 1.
    kinds = ["averaged", "no_sync", "no_sync", "averaged", "averaged", "no_grad", "averaged"]
    first, second, sent = [5.0], [5.0], True  # both start from rank 0's
    for kind in kinds:
        before = first[-1] if sent else second[-1]
        first.append(0.9 * first[-1] + 1)
        second.append(0.9 * before + 2)
        sent = kind == "averaged"  # and so the next forward begins with rank 0's
    found = ranks(2, follow_buffers, wrapper, kinds).results
    torch.testing.assert_close(found, [first, second], rtol=0, atol=2e-4)


def go_forward_twice(rank, world_size, wrapper):
    """The gradient of one backward after two forwards through a BatchNorm."""
    torch.manual_seed(0)
    model = wrap(wrapper, nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    generator = torch.Generator().manual_seed(rank)
    one, two = torch.randn(2, 5, 3, generator=generator)
    (model(one).square().sum() + model(two).abs().sum()).backward()
    finish_gradient_synchronization(model)
    return model.module[0].weight.grad


@by_name
def test_two_forwards_may_come_before_one_backward(ranks, wrapper):
    first, second = ranks(2, go_forward_twice, wrapper).results
    (theirs, _) = ranks(2, go_forward_twice, DistributedDataParallel).results
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    torch.testing.assert_close(first, theirs)
