"""What a rank of two exchanges, which has the same neighbour on both sides."""

from mgpu_tutorial.nonblocking import transfers


def test_two_ranks_swap_with_each_other_in_one_batch(ranks):
    report = ranks(2, transfers.exchange_with_neighbours, trace=True)
    assert report.results == [[1, 1], [0, 0]]
    for rank in range(2):
        calls = [event.op for event in report.events if event.rank == rank]
        assert calls == [*["isend"] * 2, *["irecv"] * 2, *["wait"] * 4]
