"""Times are taken in turns, and the furthest number counts."""

import math
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from mgpu_tutorial.lab import measure
from mgpu_tutorial.lab.measure import in_turns, largest_difference


def test_actions_take_turns_and_the_first_turns_do_not_count(monkeypatch):
    """Call number k of the clock says k squared, so each action takes longer."""
    order, calls = [], count()
    clock = SimpleNamespace(perf_counter=lambda: next(calls) ** 2)
    monkeypatch.setattr(measure, "time", clock)
    actions = {name: lambda name=name: order.append(name) for name in "ab"}
    seconds = in_turns(actions, turns=3, warm_up=2)
    assert order == list("ababababab")
    assert seconds == {"a": [17, 25, 33], "b": [21, 29, 37]}


def test_the_largest_difference_is_found_anywhere():
    one = {"a": [torch.zeros(2), torch.zeros(1, 3)], "b": torch.zeros(0)}
    other = {"a": [torch.zeros(2), torch.tensor([[0.0, -3.0, 2.0]])], "b": torch.zeros(0)}
    assert largest_difference(one, other) == largest_difference(other, one) == 3.0
    assert largest_difference(one, one) == 0.0
    for value in (math.nan, math.inf):
        assert largest_difference(torch.tensor([value, 0.0]), torch.zeros(2)) == math.inf
    for changed in ({"a": one["a"], "c": one["b"]}, one | {"b": torch.zeros(1)}):
        with pytest.raises(ValueError):
            largest_difference(one, changed)
