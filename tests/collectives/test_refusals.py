"""What a ring cannot sum in place it refuses, on every rank; all else is the sum."""

import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial.collectives import calls, ring

both = pytest.mark.parametrize("method", [ring.ring_all_reduce, ring.naive_all_reduce])
HALVES = [ring.reduce_scatter_ring, ring.all_gather_ring]


def halve(rank, world_size, half, count):
    half(torch.ones(8).tensor_split(count))


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("ranks_, count", [(2, 1), (2, 3), (3, 2), (1, 2)])
def test_there_is_a_chunk_for_each_rank(half, ranks_, count, refused):
    refused(ranks_, f"world size {ranks_}, got {count} chunks", halve, half, count)


def strided(rank, world_size, half):
    half(torch.ones(4, 2 * world_size)[:, :world_size].tensor_split(world_size, dim=1))


@pytest.mark.parametrize("half", HALVES)
def test_a_chunk_lies_in_one_place(half, refused):
    refused(2, "copy it back", strided, half)


def alias(rank, world_size, half, shared):
    memory = torch.ones(world_size + 1)
    half([memory[:2] if shared == "one" else memory[i : i + 2] for i in range(world_size)])


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("shared", ["one", "neighbours"])
def test_no_two_chunks_share_memory(half, shared, refused):
    refused(3, "chunks that share memory", alias, half, shared)


def sum_of(rank, world_size, method, make):
    method(make())


@both
@pytest.mark.parametrize("count", [1, 2])
def test_a_tensor_that_is_not_contiguous_is_not_summed(method, count, refused):
    refused(count, "copy it back", sum_of, method, lambda: torch.ones(3, 4).t())
    refused(count, "copy it back", sum_of, method, lambda: torch.ones(8)[::2])


@both
def test_a_view_that_is_negated_when_it_is_read_is_not_summed(method, refused):
    def imaginary():
        return torch.ones(1, dtype=torch.complex64).conj().imag

    assert imaginary().is_neg()
    refused(2, "the bytes would travel as they lie", sum_of, method, imaginary)


@both
def test_a_tensor_that_autograd_records_is_not_summed(method, refused):
    refused(2, "sum its .grad", sum_of, method, lambda: torch.ones(5, requires_grad=True))


@pytest.mark.parametrize("name", ["sum", "BAND", "PREMUL_SUM", "name", "", None, 3])
def test_an_operator_that_no_numbers_have_is_refused(name, refused):
    refused(2, "for these numbers: SUM, AVG, PRODUCT, MIN, MAX", calls.reduce_with, name)


@both
def test_truths_are_not_summed(method, refused):
    words = "a sum of torch.bool counts nothing: sum tensor.int()"
    refused(2, words, sum_of, method, lambda: torch.ones(5, dtype=torch.bool))


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


def sum_outside(rank, world_size):
    other = [dist.new_group([r]) for r in range(2)][1 - rank]
    ring.ring_all_reduce(torch.ones(2), other)


def test_a_rank_that_is_not_in_the_group_is_told(refused):
    refused(2, "this rank is not in the group", sum_outside, sent=True)


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
