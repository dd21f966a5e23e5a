"""Groups, the ring, and what they cost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial.collectives import calls, figures, ring
from mgpu_tutorial.shared.cost_model.links import Link


@pytest.mark.parametrize("world_size", [2, 3])
def test_groups_reduce_apart(ranks, world_size):
    report = ranks(world_size, calls.pairs, trace=True)
    evens, odds = tuple(range(0, world_size, 2)), tuple(range(1, world_size, 2))
    members = {rank: evens if rank in evens else odds for rank in range(world_size)}
    assert report.results == [sum(members[rank]) for rank in range(world_size)]
    assert {event.rank: event.group for event in report.events} == members


@pytest.mark.parametrize("count, world_size", [(5, 1), (11, 3), (2, 4), (12, 4)])
def test_a_rank_of_the_ring_sends_all_chunks_but_one_to_the_right_twice(
    ranks, count, world_size
):
    """First all but the one that it finishes, then all but the one that is finished next."""
    report = ranks(world_size, ring.reduce_by, ring.ring_all_reduce, count, trace=True)
    chunks = [4 * len(chunk) for chunk in torch.arange(count).tensor_split(world_size)]
    steps = 2 * (world_size - 1)
    for rank in range(world_size):
        mine = [event for event in report.events if event.rank == rank]
        right = (rank + 1) % world_size
        order = [chunks[(rank - step) % world_size] for step in range(steps)]
        assert [(e.peer, e.nbytes) for e in mine if e.sends] == [(right, n) for n in order]
        assert [e.op for e in mine] == ["isend", "recv", "wait"] * steps


sizes = st.floats(1, 1e12)
links = st.builds(Link, st.floats(0, 1e-2), st.floats(1e3, 1e12))


@given(sizes, st.integers(1, 10_000), links)
def test_the_naive_way_costs_two_latencies_and_each_other_tensor_twice(nbytes, ranks, link):
    latency, bandwidth = link
    way_in = latency + sum([nbytes / bandwidth] * (ranks - 1))
    assert ring.naive_seconds(nbytes, ranks, link) == pytest.approx(2 * way_in)


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e11), st.integers(2, 64))
def test_the_fit_finds_the_link_it_was_made_with(latency, bandwidth, ranks):
    sizes = [2**k for k in range(10, 30, 3)]
    seconds = [2 * (ranks - 1) * (latency + size / ranks / bandwidth) for size in sizes]
    fitted = figures.fit_link(sizes, seconds, ranks)
    assert fitted == pytest.approx((latency, bandwidth), rel=1e-3)
    disturbed = figures.fit_link(sizes, [*seconds[:-1], 2 * seconds[-1]], ranks)
    assert disturbed.latency == pytest.approx(latency, rel=0.5)  # relative errors count
