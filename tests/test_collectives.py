"""Every collective against the same thing done by one process."""

import itertools
import time
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial import collectives as co
from mgpu_tutorial.collectives.drawings import movements
from mgpu_tutorial.collectives.measurements import (
    compare_with_model,
    fit_alpha_beta,
    time_methods,
)
from mgpu_tutorial.lab import RankFailed, RanksHung, launch, traffic
from tests.thorough import MESSAGES
from tests.together import together

N = 4
METHODS = [co.ring_all_reduce, co.naive_all_reduce, dist.all_reduce]
SIZES = [1, 3, 4, 1003]


def numbers(held):
    """A tensor or a list of tensors as a list of numbers; None stays."""
    if held is None:
        return None
    return torch.cat(held).tolist() if isinstance(held, list) else held.tolist()


ONE_EACH = [[10], [20], [30], [40]]
ROWS = [[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33], [40, 41, 42, 43]]
COLUMNS = [[10, 20, 30, 40], [11, 21, 31, 41], [12, 22, 32, 42], [13, 23, 33, 43]]
MOVEMENTS = {  # what each rank holds before, and what it holds after
    co.broadcast: (ONE_EACH, [[10]] * 4),
    co.reduce: (ONE_EACH, [[100], None, None, None]),
    co.all_reduce: (ONE_EACH, [[100]] * 4),
    co.scatter: ([[10, 11, 12, 13], None, None, None], [[10], [11], [12], [13]]),
    co.gather: (ONE_EACH, [[10, 20, 30, 40], None, None, None]),
    co.all_gather: (ONE_EACH, [[10, 20, 30, 40]] * 4),
    co.reduce_scatter: (ROWS, [[100], [104], [108], [112]]),
    co.all_to_all: (ROWS, COLUMNS),
}
OPERATORS = {"SUM": 10, "PRODUCT": 24, "MIN": 1, "MAX": 4, "AVG": 2.5}


@pytest.fixture(scope="module")
def found():
    """What four ranks return in every movement, with every operator, and in groups."""
    operators = {name: partial(co.reduce_with, name=name) for name in OPERATORS}
    others = [co.pairs, co.ring_step_by_step, reduce_where_not_a_member]
    workers = {worker: worker for worker in [*MOVEMENTS, *others]} | operators
    workers["of integers"] = partial(co.reduce_with, name="SUM", dtype=torch.int64)
    return dict(zip(workers, together(N, *workers.values()), strict=True))


@pytest.mark.parametrize("worker", MOVEMENTS, ids=lambda worker: worker.__name__)
def test_the_eight_movements(found, worker):
    sides = [[numbers(result[side]) for result in found[worker]] for side in (0, 1)]
    assert tuple(sides) == MOVEMENTS[worker]


def test_a_movement_is_drawn_with_its_call_and_its_use():
    drawing = movements({co.gather: "to count", co.all_to_all: "to sort"}, world_size=2)
    assert repr(drawing).split("\n") == [
        "dist.gather(mine, places, dst=0)",
        "to count",
        "rank 0  [10] → [10, 20]",
        "rank 1  [20] → [·, ·]",
        "",
        "dist.all_to_all(places, pieces)",
        "to sort",
        "rank 0  [10, 11] → [10, 20]",
        "rank 1  [20, 21] → [11, 21]",
    ]
    assert "dist.gather(mine, places, dst=0)" in drawing.svg()


@pytest.mark.parametrize("name", OPERATORS)
def test_reduce_operators(found, name):
    assert found[name] == [OPERATORS[name]] * N


def test_integers_have_a_sum_and_no_average(found):
    results = found["of integers"]
    assert results == [10] * N and type(results[0]) is int
    with pytest.raises(RankFailed, match="result type Float can't be cast"):
        launch(co.reduce_with, N, "AVG", torch.int64)


def test_groups_reduce_apart(found):
    assert found[co.pairs] == [2.0, 4.0, 2.0, 4.0]


def test_different_operations_hang_without_the_check_and_fail_with_it(monkeypatch):
    with pytest.raises(RanksHung):
        launch(co.different_operations, 2, timeout=1)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    with pytest.raises(RankFailed, match="ALLREDUCEvs BROADCAST"):
        launch(co.different_operations, 2, timeout=5)


def reduce_different_shapes(rank, world_size):
    dist.all_reduce(torch.ones(2 if rank == 0 else 4))


def test_different_shapes_strand_the_larger():
    with pytest.raises(RankFailed, match="rank 0 returned while rank 1 still waited"):
        launch(reduce_different_shapes, 2, timeout=5)


def leave_out_the_first(rank, world_size):
    first, second = torch.tensor([10.0 * (rank + 1)]), torch.tensor([1.0 * (rank + 1)])
    if rank == 0:
        dist.all_reduce(first)
        return first.item()
    dist.all_reduce(second)
    return second.item()


def test_the_next_call_meets_the_one_that_others_left_out():
    assert launch(leave_out_the_first, 2, timeout=5).results == [12.0, 12.0]  # 10 and 2


def reduce_where_not_a_member(rank, world_size):
    group = dist.new_group([1, 3])
    value = torch.tensor([float(rank)])
    dist.all_reduce(value, group=group)
    if rank in (1, 3):
        dist.broadcast(value, src=3, group=group)  # a rank of the whole job
    return value.item()


def test_outside_a_group_its_collectives_do_nothing(found):
    assert found[reduce_where_not_a_member] == [0.0, 4.0, 2.0, 4.0]


def take_the_maximum_of_a_sum(rank, world_size):
    value = torch.tensor([rank + 1.0])
    dist.all_reduce(value, op=dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.MAX)
    return value.item()


def test_calls_of_one_kind_meet_whatever_they_mean():
    assert launch(take_the_maximum_of_a_sum, 2, timeout=5).results == [3.0, 3.0]


@cache
def reduced(world_size):
    """What the ranks return by each method, with each size, in one launch."""
    cases = list(itertools.product(METHODS, SIZES))
    calls = [partial(co.reduce_by, method=method, count=size) for method, size in cases]
    return dict(zip(cases, together(world_size, *calls), strict=True))


@pytest.mark.parametrize("world_size", MESSAGES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_every_all_reduce_equals_one_process(method, size, world_size):
    seeds = [torch.Generator().manual_seed(rank) for rank in range(world_size)]
    alone = sum(torch.randn(size, generator=seed) for seed in seeds)
    results = reduced(world_size)[method, size]
    torch.testing.assert_close(results, [alone] * world_size)
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("world_size, sent", [(2, 48_000), (3, 64_000), (4, 72_000)])
def test_the_ring_sends_what_the_formula_says(world_size, sent):
    report = launch(co.reduce_by, world_size, co.ring_all_reduce, 12_000, trace=True)
    assert [row[3] for row in traffic(report).rows] == [sent] * world_size


def test_the_naive_way_loads_rank_0():
    report = launch(co.reduce_by, N, co.naive_all_reduce, 12_000, trace=True)
    assert [row[3] for row in traffic(report).rows] == [144_000, 48_000, 48_000, 48_000]


def say_bytes(tensor):
    print(tensor.nbytes)


def pause_but_once(tensor, calls=[]):  # noqa: B006
    calls.append(tensor)
    time.sleep(0.3 if len(calls) != 3 else 0)


def test_sizes_that_are_timed_are_in_bytes():
    report = launch(time_methods, 2, [say_bytes], [4096, 2**25], turns=2)
    assert report.stdout == [("4096\n" * 5 + "33554432\n") * 2] * 2
    assert set(report.results[0]) == {("say_bytes", 4096), ("say_bytes", 2**25)}


def test_the_least_of_several_measurements_is_taken():
    report = launch(time_methods, 1, [pause_but_once], [4096], turns=1)
    assert report.results[0]["pause_but_once", 4096] < 0.3


def test_ring_naive_and_tree_cost_what_is_written_down():
    # 8 ranks, 10 µs, 1 GB/s, 8 MB: 14 steps of 1 MB, or 3 levels twice with all of it
    assert co.ring_seconds(8_000_000, 8, 1e-5, 1e9) == pytest.approx(14 * (1e-5 + 1e-3))
    # seven tensors of 8 MB into rank 0 and seven out, each time with one latency
    assert co.naive_seconds(8_000_000, 8, 1e-5, 1e9) == pytest.approx(2e-5 + 14 * 8e-3)
    assert co.tree_seconds(8_000_000, 8, 1e-5, 1e9) == pytest.approx(6 * (1e-5 + 8e-3))
    assert co.tree_seconds(0, 1024, 1e-5, 1e9) == pytest.approx(20e-5)
    assert co.tree_seconds(0, 5, 1e-5, 1e9) == pytest.approx(6e-5)


def test_measured_times_stand_beside_the_model():
    # 4 ranks, 1 ms, 1 MB/s, 1 KiB: the ring 6 (1 + 0.256) ms, the naive way 2 + 6.144 ms
    table = compare_with_model([1024], [0.01], [0.02], [0.005], 4, 1e-3, 1e6)
    assert table.rows == [["1 KiB", "10.00", "7.54", "2.00", "1.08", "0.50"]]


def test_the_fit_finds_the_alpha_and_beta_it_was_made_with():
    sizes = [2**k for k in range(10, 26, 3)]
    seconds = [6 * (5e-5 + size / 4 / 2e9) for size in sizes]
    assert fit_alpha_beta(sizes, seconds, 4) == pytest.approx((5e-5, 2e9), rel=1e-6)


def test_step_by_step_ends_with_all_digits(found):
    assert found[co.ring_step_by_step] == [[1111] * N] * N


def reduce_recorded_sizes(rank, world_size):
    """Each method is given tensors of as many bytes as its time is booked under."""
    given = []

    def first_method(tensor):
        given.append(("first_method", tensor.nbytes))

    def second_method(tensor):
        given.append(("second_method", tensor.nbytes))

    methods = [first_method, second_method]
    booked = time_methods(rank, world_size, methods, [64, 4096], turns=2)
    return list(dict.fromkeys(given)), list(booked)


def test_methods_are_timed_on_tensors_of_the_bytes_that_are_booked():
    once = [(name, n) for n in (64, 4096) for name in ("first_method", "second_method")]
    assert launch(reduce_recorded_sizes, 2).results == [(once, once)] * 2
