"""Every collective against the same thing done by one process."""

import pytest
import torch

from mgpu_tutorial import collectives as co
from mgpu_tutorial.lab import RankFailed, RanksHung, launch, traffic

N = 4
METHODS = [co.ring_all_reduce, co.naive_all_reduce, co.whole_ring, co.gloo_all_reduce]


def after(worker):
    return [result[1] for result in launch(worker, N).results]


def test_the_eight_movements():
    values = [10 * (r + 1) for r in range(N)]
    lists = torch.tensor(values)[:, None] + torch.arange(N)
    nothing = [None] * N
    assert after(co.broadcast) == [[10]] * N
    assert after(co.scatter) == [[10], [11], [12], [13]]
    assert after(co.gather) == [values, nothing, nothing, nothing]
    assert after(co.all_gather) == [values] * N
    assert after(co.reduce) == [[sum(values)], [None], [None], [None]]
    assert after(co.all_reduce) == [[sum(values)]] * N
    assert after(co.reduce_scatter) == lists.sum(dim=0)[:, None].tolist()
    assert after(co.all_to_all) == lists.T.tolist()


def test_a_barrier_keeps_the_early_waiting():
    late, *early = launch(co.barrier, 3, pause=0.4).results
    assert late < min(early) and min(early) > 0.2


@pytest.mark.parametrize(
    "name, value", [("SUM", 10), ("PRODUCT", 24), ("MIN", 1), ("MAX", 4), ("AVG", 2.5)]
)
def test_reduce_operators(name, value):
    assert launch(co.reduce_with, N, name).results == [value] * N


def test_groups_reduce_apart():
    assert launch(co.pairs, N).results == [2.0, 4.0, 2.0, 4.0]


def test_a_started_all_reduce_ends_with_the_sum():
    assert launch(co.started_early, N).results == [6.0] * N


def test_different_operations_hang_without_the_check_and_fail_with_it(monkeypatch):
    with pytest.raises(RanksHung):
        launch(co.different_operations, 2, timeout=1)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    with pytest.raises(RankFailed, match="ALLREDUCEvs BROADCAST"):
        launch(co.different_operations, 2, timeout=5)


def test_different_shapes_strand_the_larger():
    with pytest.raises(RankFailed, match="rank 0 returned while rank 1 still waited"):
        launch(co.different_shapes, 2, timeout=5)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 3, 4, 1003])
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.__name__)
def test_every_all_reduce_equals_one_process(method, size, world_size):
    seeds = [torch.Generator().manual_seed(rank) for rank in range(world_size)]
    alone = sum(torch.randn(size, generator=seed) for seed in seeds)
    results = launch(co.reduce_by, world_size, method, size).results
    torch.testing.assert_close(results, [alone] * world_size)
    if method is not co.whole_ring:
        assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_the_ring_sends_what_the_formula_says(world_size):
    size = 12_000
    report = launch(co.reduce_by, world_size, co.ring_all_reduce, size, trace=True)
    expected = 2 * (world_size - 1) / world_size * size * 4
    assert [row[3] for row in traffic(report).rows] == [expected] * world_size


def test_the_fit_finds_the_alpha_and_beta_it_was_made_with():
    sizes = [2**k for k in range(10, 26, 3)]
    seconds = [co.ring_seconds(size, 4, 5e-5, 2e9) for size in sizes]
    assert co.fit_alpha_beta(sizes, seconds, 4) == pytest.approx((5e-5, 2e9), rel=1e-6)


def test_step_by_step_ends_with_all_digits():
    assert launch(co.ring_step_by_step, N).results == [[1111] * N] * N
