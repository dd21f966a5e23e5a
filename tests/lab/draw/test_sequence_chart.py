"""The chart pairs each message with its arrival."""

import torch
import torch.distributed as dist

from mgpu_tutorial.lab.draw.sequence_chart import MessageLog


def the_second_first(rank, world_size):
    """Rank 1 receives what has tag 2 first, which rank 0 has sent second."""
    if rank == 0:
        works = [dist.isend(torch.ones(tag), dst=1, tag=tag) for tag in (1, 2)]
        for work in works:
            work.wait()
    else:
        for tag in (2, 1):
            dist.recv(torch.ones(tag), src=0, tag=tag)


def test_a_message_arrives_where_its_tag_was_received(ranks):
    log = MessageLog(ranks(2, the_second_first, device="cpu", trace=True, timeout=20))
    tags = [tuple(log.events[end].tag for end in ends) for ends in log.messages]
    assert sorted(tags) == [(1, 1), (2, 2)]
