"""What a rank of two exchanges with its only neighbour, and what the span of work holds."""

from torch.utils.flop_counter import FlopCounterMode

from mgpu_tutorial.nonblocking import transfers


def test_the_span_of_compute_holds_its_products(monkeypatch):
    counted = FlopCounterMode(display=False)
    monkeypatch.setattr(transfers, "span", {"compute": counted}.get)
    transfers.compute(3)
    assert counted.get_total_flops() == 3 * 2 * 128**3


def test_two_ranks_swap_with_each_other_in_one_batch(ranks):
    report = ranks(2, transfers.exchange_with_neighbours, trace=True)
    assert report.results == [[101, 201], [100, 200]]
    for rank in range(2):
        calls = [event.op for event in report.events if event.rank == rank]
        assert calls == [*["isend"] * 2, *["irecv"] * 2, *["wait"] * 4]
