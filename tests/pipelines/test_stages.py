"""1F1B computes what one process does, and waits for all that it has sent."""

import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial.pipelines import stages
from tests.pipelines.linear_stages import LinearStages, expected_of


def run_1f1b(rank, world_size, micro):
    given = LinearStages(world_size), micro, stages.order_of_1f1b, stages.isend
    return stages.run_in_order(rank, world_size, *given)


def test_1f1b_has_the_gradients_of_one_process_with_fewer_micro_batches_than_ranks(ranks):
    results = ranks(3, run_1f1b, 2).results
    gradients = [own for _, own in results]
    torch.testing.assert_close(gradients, expected_of(3, 2), rtol=0, atol=1e-12)


def test_a_message_is_sent_without_blocking_and_waited_for(ranks):
    report = ranks(3, run_1f1b, 6, trace=True)
    for rank, sent in enumerate((6, 12, 6)):
        ops = [e.op for e in report.events if e.rank == rank]
        assert ops.count("isend") == ops.count("wait") == sent


def in_a_group(rank, world_size, order):
    """Ranks 0 and 2, and ranks 1 and 3, are two pipelines with numbers of their own."""
    group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    given = dist.get_rank(group), 2, LinearStages(2), 3 + rank % 2
    if order == "gpipe":
        return stages.run_gpipe(*given, group)
    return stages.run_in_order(*given, stages.order_of_1f1b, stages.isend, group)


@pytest.mark.parametrize("order", ["gpipe", "1f1b"])
def test_two_groups_are_two_worlds(ranks, order):
    results = ranks(4, in_a_group, order).results
    for first in 0, 1:
        gradients = [own for _, own in results[first::2]]
        expected = expected_of(2, 3 + first)
        torch.testing.assert_close(gradients, expected, rtol=0, atol=1e-12)
