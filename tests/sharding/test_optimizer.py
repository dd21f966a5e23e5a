"""The state of a sharded optimizer is that of one process, whoever wrote it."""

import pytest
import torch
from torch import nn

from mgpu_tutorial.lab import launch
from mgpu_tutorial.sharding.optimizer import share_out
from tests.sharding import ranks


def test_parameters_are_shared_out_by_size():
    sizes = [3, 8, 5, 5, 1]
    parameters = [nn.Parameter(torch.ones(size)) for size in sizes]
    owner = share_out(parameters, 2)
    # 8 to rank 0, 5 and 5 to rank 1, 3 to rank 0 (8 against 10), 1 to rank 1 (11 against 10)
    assert [owner[p] for p in parameters] == [0, 0, 1, 1, 1]


def same_state(mine, plain):
    assert mine["param_groups"] == plain["param_groups"]
    assert list(mine["state"]) == list(plain["state"])
    for i, state in plain["state"].items():
        assert list(mine["state"][i]) == list(state)
        for name, value in state.items():
            torch.testing.assert_close(mine["state"][i][name], value, rtol=0, atol=1e-12)


@pytest.fixture(scope="module")
def first_half():
    return launch(ranks.train_groups, 2).results


@pytest.fixture(scope="module")
def alone():
    return launch(ranks.train_groups_alone, 1).results[0]


def test_a_gathered_state_is_that_of_one_process(first_half, alone):
    held = [number for _, _, number in first_half]
    assert sum(held) == alone[2] == 28 and all(held)
    for model, state, _ in first_half:
        same_state(state, alone[1])
        torch.testing.assert_close(model, alone[0], rtol=0, atol=1e-12)
    assert state["param_groups"][0]["lr"] == 0.02 / 8  # three steps of the scheduler
    assert state["param_groups"][1]["amsgrad"] is True


def test_other_ranks_and_a_plain_optimizer_go_on_from_it(first_half, alone):
    model, state, _ = first_half[0]
    two = {"steps": (3, 5)}
    expected = launch(ranks.train_groups_alone, 1, alone[0], alone[1], **two).results[0]
    plain = launch(ranks.train_groups_alone, 1, model, state, **two).results[0]
    torch.testing.assert_close(plain[0], expected[0], rtol=0, atol=1e-12)
    for found in launch(ranks.train_groups, 3, model, state, **two).results:
        torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)
        same_state(found[1], expected[1])
