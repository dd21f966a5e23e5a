"""The ring gives the sum of any shape and dtype, in any group."""

import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial.collectives import ring

both = pytest.mark.parametrize("method", [ring.ring_all_reduce, ring.naive_all_reduce])


def sum_in(rank, world_size, members):
    group = dist.new_group(members)
    tensor = torch.arange(5) * 10**rank
    if rank in members:
        ring.ring_all_reduce(tensor, group)
    return tensor.tolist()


@pytest.mark.parametrize("members", [[1, 3], [3, 0, 2], [2], [0, 1, 2, 3]])
def test_a_group_sums_as_a_world_of_its_own(members, ranks):
    alone = torch.arange(5) * sum(10**member for member in members)
    for rank, found in enumerate(ranks(4, sum_in, members).results):
        own = (torch.arange(5) * 10**rank).tolist()
        assert found == (alone.tolist() if rank in members else own)


def test_a_ring_is_two_messages_for_each_other_rank_and_no_more(ranks):
    report = ranks(3, ring_of_ones, trace=True)
    for rank in range(3):
        ops = [event.op for event in report.events if event.rank == rank]
        assert ops == ["isend", "recv", "wait"] * 4


def ring_of_ones(rank, world_size):
    ring.ring_all_reduce(torch.ones(7))


def sum_twice(rank, world_size, shape, dtype, method):
    torch.manual_seed(rank)
    tensor = torch.randint(0, 3, shape).to(dtype)
    for _ in range(2):
        method(tensor)
    return tensor


SHAPES = [(0,), (), (1,), (2,), (7,), (5, 3), (2, 1, 3)]
DTYPES = [torch.int64, torch.int8, torch.float16, torch.bfloat16, torch.float64]


@both
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_sum_of_any_shape_and_dtype_twice_in_a_row(method, count, ranks):
    every = [(shape, torch.float32) for shape in SHAPES] + [((7,), d) for d in DTYPES]
    results = ranks(count, sum_each_twice, every, method).results
    for shape_and_dtype, *found in zip(every, *results, strict=True):
        shape, dtype = shape_and_dtype
        seeds = [torch.Generator().manual_seed(rank) for rank in range(count)]
        alone = sum(torch.randint(0, 3, shape, generator=seed) for seed in seeds)
        for one in found:
            torch.testing.assert_close(one, (alone * count).to(dtype), rtol=0, atol=0)


def sum_each_twice(rank, world_size, every, method):
    return [sum_twice(rank, world_size, *one, method) for one in every]


def frozen(rank, world_size):
    weight = torch.nn.Parameter(torch.full((3,), 1.0 + rank))
    with torch.no_grad():
        ring.ring_all_reduce(weight)
    dist.barrier()
    return weight.detach()


def test_a_parameter_is_summed_where_autograd_does_not_record(ranks):
    assert all(one.tolist() == [3.0] * 3 for one in ranks(2, frozen).results)
