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


class Exponentials(nn.Module):
    def __init__(self, fails=False):
        super().__init__()
        self.fails = fails

    def forward(self, x):
        if self.fails:
            raise ValueError("in the middle")
        return two_exponentials(x)


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_counted_after_the_block_even_where_the_forward_pass_failed(fails):
    x = torch.ones(100, requires_grad=True)
    inner = Exponentials(fails)
    model = nn.Sequential(Exponentials(), inner)
    with Ledger().saved_for_backward(model, inner) as ledger:
        try:
            model(x)
        except ValueError:
            assert fails
        during = dict(ledger["cpu"])
    assert during == {"activations": 800 if fails else 1600}
    two_exponentials(x)  # by this thread
    inner.fails = False
    model(x)  # by modules that were watched
    assert ledger["cpu"] == during
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model)


def test_what_was_counted_before_stays_under_its_category_and_is_not_saved():
    batch = torch.ones(100, requires_grad=True)
    ledger = Ledger()
    ledger.add("batch", batch)
    with ledger.saved_for_backward():
        y = (batch * batch).exp()  # keeps the batch, and its own result
    assert ledger["cpu"] == {"batch": 400, "activations": 400}
    assert ledger.saved_now("cpu") == ledger.saved_peak("cpu") == 400
    del y


def test_a_weight_that_autograd_keeps_is_a_parameter_and_not_saved():
    layer = nn.Linear(10, 10, bias=False)
    with Ledger().saved_for_backward(layer) as ledger:
        y = layer(torch.ones(1, 10, requires_grad=True))
    assert ledger["cpu"] == {"parameters": 400, "activations": 40}
    assert ledger.saved_now("cpu") == 40
    del y
