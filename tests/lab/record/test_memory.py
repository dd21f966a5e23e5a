"""The ledger counts each storage once, on its device, and what it says is what is there."""

import torch

from mgpu_tutorial.lab import Ledger


def two_exponentials(x):
    """exp keeps its result, so a row of n float32 keeps 4 n bytes, twice."""
    return x.exp().exp()


def test_what_autograd_holds_goes_down_with_backward_and_the_peak_stays():
    x = torch.ones(100, requires_grad=True)
    with Ledger().saved_for_backward() as ledger:
        first = two_exponentials(x)
        assert ledger.saved_now("cpu") == ledger.saved_peak("cpu") == 800
        second = two_exponentials(x)
        assert ledger.saved_now("cpu") == 1600
        first.sum().backward()
        assert ledger.saved_now("cpu") == 800
        third = two_exponentials(x)
    second.sum().backward()  # also after the block
    assert (ledger.saved_now("cpu"), ledger.saved_peak("cpu")) == (800, 1600)
    del third  # no backward, but nobody can ask for one any more
    assert (ledger.saved_now("cpu"), ledger.saved_peak("cpu")) == (0, 1600)
    assert ledger["cpu"] == {"activations": 2400} and ledger.saved_now("virtual:0") == 0


def test_a_storage_that_is_saved_twice_is_held_until_both_are_done():
    x = torch.ones(100, requires_grad=True)
    with Ledger().saved_for_backward() as ledger:
        y = x.exp()  # saved by exp, and again by each product
        a, b = y * y, y[:50] * y[50:]
    a.sum().backward(retain_graph=True)
    assert ledger.saved_now("cpu") == ledger.saved_peak("cpu") == 400
    del y, a
    b.sum().backward()
    assert ledger.saved_now("cpu") == 0
