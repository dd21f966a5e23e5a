"""How the methods of all-reduce are timed."""

from mgpu_tutorial.collectives import figures, ring


def time_each_once(rank, world_size):
    figures.in_turns = lambda actions, *_, **__: {
        method: [0.5, action() or 0.25] for method, action in actions.items()
    }
    return figures.turns(rank, world_size, (ring.naive_all_reduce,))


def test_of_each_method_the_least_time_until_the_slowest_rank_has_done_it_is_shown(ranks):
    report = ranks(2, time_each_once, trace=True)
    assert report.results[0] == [[size, 250.0] for size in ("4,000", "400,000", "20,000,000")]
    mine = [event for event in report.events if event.rank == 1]
    assert [event.nbytes for event in mine if event.sends] == [4_000, 400_000, 20_000_000]
    assert [event.op for event in mine][2::3] == ["barrier"] * 3
