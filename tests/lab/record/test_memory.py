"""The ledger counts each storage once, on its device, and what it says is what is there."""

import pytest
import torch
from torch import nn

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


def test_what_was_named_before_is_not_counted_as_saved():
    net, batch = nn.Sequential(nn.Linear(10, 10), nn.Tanh()), torch.zeros(4, 10)
    ledger = Ledger()
    ledger.record_state(net)
    ledger.add("batch", {"a": [batch, batch[2:]], "b": (batch.view(5, 8), None, 3)})
    with ledger.saved_for_backward():
        out = net(batch)  # Linear keeps the batch, Tanh its result
    ledger.add("outputs", out)  # which has a name
    assert ledger["cpu"] == {"parameters": 440, "batch": 160, "activations": 160}
    assert ledger.saved_peak("cpu") == 160
    out.sum().backward()
    assert ledger.saved_now("cpu") == 0


def test_nothing_is_watched_afterwards_even_when_the_forward_pass_fails():
    net, ledger = nn.Sequential(nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 10)), Ledger()
    with pytest.raises(RuntimeError), ledger.saved_for_backward(net):
        net(torch.zeros(2, 4))
    before = dict(ledger["cpu"])
    net(torch.zeros(2, 32)).sum().backward()
    assert ledger["cpu"] == before and not net._forward_hooks and not net._forward_pre_hooks
