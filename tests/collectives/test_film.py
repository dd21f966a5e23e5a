"""The film of a ring is the same in whatever way it sends and receives."""

import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial.collectives import ring
from mgpu_tutorial.collectives.builds import build, rounds
from mgpu_tutorial.collectives.figures import ring_film
from mgpu_tutorial.lab import film
from mgpu_tutorial.lab.run.errors import RankFailed


def wait_for(*works):
    for work in works:
        work.wait()


def isend_recv(outgoing, right, incoming, left):
    sending = dist.isend(outgoing, right)
    dist.recv(incoming, left)
    sending.wait()


def isend_recv_from_anybody(outgoing, right, incoming, left):
    sending = dist.isend(outgoing, right)
    dist.recv(incoming)
    sending.wait()


def irecv_send(outgoing, right, incoming, left):
    receiving = dist.irecv(incoming, left)
    dist.send(outgoing, right)
    receiving.wait()


def irecv_isend(outgoing, right, incoming, left):
    wait_for(dist.irecv(incoming, src=left), dist.isend(outgoing, dst=right))


def batch(outgoing, right, incoming, left):
    ends = [dist.P2POp(dist.isend, outgoing, right), dist.P2POp(dist.irecv, incoming, left)]
    wait_for(*dist.batch_isend_irecv(ends))


def batch_receives_first(outgoing, right, incoming, left):
    ends = [dist.P2POp(dist.irecv, incoming, left), dist.P2POp(dist.isend, outgoing, right)]
    wait_for(*dist.batch_isend_irecv(ends))


def odd_receives_first(outgoing, right, incoming, left):
    if dist.get_rank() % 2:
        dist.recv(incoming, left)
        dist.send(outgoing, right)
    else:
        irecv_send(outgoing, right, incoming, left)


def one_after_another(outgoing, right, incoming, left):
    if dist.get_rank() == 0:
        dist.send(outgoing, right)
        dist.recv(incoming, left)
    else:
        dist.recv(incoming, left)
        dist.send(outgoing, right)


WAYS = [
    *(isend_recv, isend_recv_from_anybody, irecv_send, irecv_isend),
    *(batch, batch_receives_first, odd_receives_first),
]


def ring_by(exchange):
    def ring_all_reduce(tensor):
        rank, world_size = dist.get_rank(), dist.get_world_size()
        right, left = (rank + 1) % world_size, (rank - 1) % world_size
        chunks = tensor.tensor_split(world_size)
        for step in range(world_size - 1):
            target = chunks[(rank - step - 1) % world_size]
            incoming = torch.empty_like(target)
            exchange(chunks[(rank - step) % world_size], right, incoming, left)
            target += incoming
        for step in range(world_size - 1):
            outgoing = chunks[(rank + 1 - step) % world_size]
            exchange(outgoing, right, chunks[(rank - step) % world_size], left)

    return ring_all_reduce


def parts_of(step, rank, count):
    """What the chunks of a rank hold after so many steps, by the rule in the text."""
    held = []
    for chunk in range(count):
        distance = (rank - chunk) % count  # from the rank where it sets out
        has_come = step >= distance
        before = {(chunk + i) % count for i in range(distance)} if has_come else set()
        is_whole = step >= count + distance
        held.append(sorted(range(count) if is_whole else {rank} | before))
    return held


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_the_film_shows_each_message_of_the_ring(way, count, ranks):
    frames = film(ranks(count, ring_film, ring_by(way), trace=True)).frames
    assert len(frames) == 2 * count - 1
    for step, shown in enumerate(frames):
        for rank in range(count):
            held = (
                f"chunk {chunk} {{{' '.join(map(str, parts))}}}"
                for chunk, parts in enumerate(parts_of(step, rank, count))
            )
            assert f"  rank {rank}: {', '.join(held)}\n" in shown.text + "\n"
            arrows = shown.text.count(f": rank {rank} → rank {(rank + 1) % count}")
            assert arrows == (step > 0)


def half_only(tensor):
    ring.reduce_scatter_ring(tensor.tensor_split(dist.get_world_size()))


@pytest.mark.parametrize("other", [half_only, ring.naive_all_reduce, dist.all_reduce])
def test_what_is_no_ring_has_no_film(other, ranks):
    with pytest.raises(RankFailed, match="no film yet: a ring of 4 leaves the sum"):
        ranks(4, ring_film, other, trace=True, timeout=5)


@pytest.mark.parametrize(
    "way, expected",
    [*((way, 10) for way in WAYS[:6]), (odd_receives_first, 20), (one_after_another, 60)],
)
def test_rounds_are_counted_by_the_order_of_the_calls(way, expected, ranks):
    report = ranks(6, run_ring, way, trace=True)
    assert rounds(report) == expected


def run_ring(rank, world_size, way):
    ring_by(way)(torch.ones(world_size))


SERIAL = """import torch.distributed as dist


def ring_all_reduce(tensor):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    chunks = tensor.tensor_split(world_size)
    for step in range(2 * world_size - 2):
        outgoing = chunks[(rank - step) % world_size]
        target = chunks[(rank - step - 1) % world_size]
        incoming = target.clone()
        if rank == 0:
            dist.send(outgoing, right)
        dist.recv(incoming, left)
        if rank > 0:
            dist.send(outgoing, right)
        if step < world_size - 1:
            target += incoming
        else:
            target.copy_(incoming)
"""


@pytest.mark.slow
def test_a_ring_of_one_message_at_a_time_is_refused(cell):
    *others, late, _ = build.rows(*cell(SERIAL))
    assert [row.holds for row in others] == [True] * len(others)
    assert "on 6 ranks 60 messages travel one after another, expected 10" in late.seen
