"""What cannot be sent to an expert is refused; what is unusual comes out right."""

import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial.experts import mixture
from mgpu_tutorial.experts.parallel import ExpertParallel, combine, dispatch
from mgpu_tutorial.shared import small_and_large as sizes


def send(rank, world_size, rows, which, experts=8):
    return dispatch(torch.ones(rows, 2), torch.tensor(which), experts)


@pytest.mark.parametrize(
    "given, named",
    [
        ((5, [0, 1, 2]), ("5 rows", "3 choices")),
        ((3, [0, 1, 2, 3, 4]), ("3 rows", "5 choices")),
        ((3, [0, 8, 9]), ("expert 9",)),
    ],
)
def test_rows_that_have_nowhere_to_go_are_refused(refused, given, named):
    refused(2, ValueError(*named), send, *given)


def share(rank, world_size, make):
    make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: ExpertParallel(7, 2),
        lambda: mixture.ExpertsDDP(sizes.small(), 7, dispatch, combine),
    ],
)
def test_experts_that_do_not_divide_are_refused(refused, make):
    refused(2, ValueError("7 experts"), share, make)


def there_and_back(rank, world_size, dtype, turned):
    """Experts answer a row times their number + 1; the sum of two answers, by hand beside."""
    x = torch.arange(3.0 * rank, 3.0 * rank + 6, dtype=dtype).view(3, 2)
    x = x.T.contiguous().T if turned else x
    chosen = torch.tensor([[0, 3], [1, 1], [2, 0]])
    weights = torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=dtype)
    arrived, which, way = dispatch(x.repeat_interleave(2, dim=0), chosen.flatten(), 4)
    first = 4 // world_size * rank
    found = combine(arrived * (first + which + 1)[:, None], way, weights)
    return found, x * (weights * (chosen + 1)).sum(dim=1, keepdim=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_any_dtype_and_any_order_of_memory_travels(ranks, world_size, dtype, turned):
    for found, wanted in ranks(world_size, there_and_back, dtype, turned).results:
        assert found.dtype == dtype
        torch.testing.assert_close(found, wanted, rtol=2e-2, atol=0)


def in_another_group(rank, world_size, call):
    groups = [dist.new_group([r]) for r in range(world_size)]
    return call(groups[1 - rank])


def test_a_group_without_this_rank_is_refused(refused):
    worker = in_another_group, lambda group: ExpertParallel(4, 1, group)
    refused(2, RuntimeError("chunk"), *worker, sent=True)


def answer(rank, world_size):
    ExpertParallel(4, 2)(torch.ones(3, 16, dtype=torch.float64))


def test_a_layer_sends_counts_rows_and_results_and_no_more(ranks):
    report = ranks(2, answer, trace=True)
    sent = [event.op for event in report.events if event.rank == 0]
    assert sent == ["all_to_all_single"] * 3
