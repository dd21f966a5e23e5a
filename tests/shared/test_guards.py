"""Each guard says what was given and what to give; `agree` names the rank that differs."""

import pytest
import torch
from torch import nn

from mgpu_tutorial.shared.guards import agree, divides, one_of, positive, whole

REFUSED = {
    "steps must be a whole number, 1 or more, got 0": lambda: whole("steps", 0),
    "whole number, 1 or more, got True": lambda: whole("steps", True),
    "whole number, 1 or more, got 2.5": lambda: whole("steps", 2.5),
    "cap must be a number above 0, got 0": lambda: positive("cap", 0),
    "above 0, got nan": lambda: positive("cap", float("nan")),
    "above 0, got inf": lambda: positive("cap", float("inf")),
    "above 0, got '25'": lambda: positive("cap", "25"),
    "one of ring, tree": lambda: one_of("way", "star", ("ring", "tree")),
    "12 heads have no 5": lambda: divides("heads", 12, 5),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_is_refused(words):
    with pytest.raises(ValueError, match=words):
        REFUSED[words]()


def test_what_can_be_passes():
    whole("steps", 0, least=0)
    whole("steps", 2.0)
    positive("cap", 0.5)
    one_of("way", "ring", {"ring"})
    divides("heads", 12, 4)


def build(rank, what):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    things = {"cap": 25, "orders": [1, 2, 3], "model": model, "start": torch.ones(3)}
    if rank == 1 and what == "name":
        model.append(nn.Linear(2, 2))
    elif rank == 1 and what == "number":
        with torch.no_grad():
            model[0].weight[0, 0] += 1e-7
    elif rank == 1 and what:
        things[what] = {"cap": 24, "orders": [1, 3, 2], "start": torch.ones(4)}[what]
    return things


def ask(rank, world_size, what):
    agree(None, **build(rank, what))


@pytest.mark.parametrize("what", ["name", "number", "cap", "orders", "start"])
def test_what_differs_on_one_rank_is_named_on_all(refused, what):
    name = {"name": "model", "number": "model"}.get(what, what)
    words = f"{name} must be the same on all ranks: rank 1 of the group has"
    refused(2, words, ask, what, sent=True)


def test_what_is_alike_passes(ranks):
    assert ranks(3, ask, None).results == [None] * 3
