"""A run that loses a process, or a whole node, ends with the bits of an undisturbed one."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.survival import elastic, figures, interval

LIMIT = 170.0  # seconds: each node imports PyTorch four times, on a busy machine


def parameters(folder):
    state = torch.load(folder / "run.pt", weights_only=True)
    assert state["step"] == elastic.STEPS
    return state["model"]


@pytest.fixture(scope="module")
def undisturbed(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert ranks(2, elastic.train, str(folder)).results == [0, 0]
    return folder


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_node_that_is_killed_costs_two_steps_and_no_bit(tmp_path, undisturbed):
    """The notebook kills a worker."""
    first, killed, second = figures.run_two_nodes(str(tmp_path), "node", LIMIT)
    assert killed.code == -9 and killed.lines == []
    assert first.code == second.code == 0, first.errors + second.errors
    lines = sorted(first.lines + second.lines)
    assert lines == [f"rank {r} has trained steps 6 to 11" for r in (0, 1)]
    assert all(figures.same_bits([str(tmp_path), str(undisturbed)]))


def test_the_run_of_two_ranks_is_that_of_one_process_written_out(undisturbed):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(12):
        pairs = [elastic.batch_of(step, rank) for rank in (0, 1)]
        inputs, targets = (torch.cat(part) for part in zip(*pairs, strict=True))
        optimizer.zero_grad()
        (model(inputs) - targets).square().mean().backward()
        optimizer.step()
    assert largest_difference(parameters(undisturbed), dict(model.state_dict())) < 1e-4


# How often to save


@given(st.floats(1, 50), st.floats(0.1, 5), st.floats(20, 500), st.integers(0, 9))
def test_a_run_with_failures_played_save_by_save(length, save, between, seed):
    """After each failure the work since the last save is done again."""
    lot = random.Random(seed)
    clock = saved = 0.0
    while saved < 1000:
        failure = clock + lot.expovariate(1 / between)
        while clock + length + save <= failure:
            clock += length + save
            saved += length
        clock = failure
    found = interval.simulate_waste(length, save, between, work=1000, seed=seed)
    assert found == pytest.approx(clock / saved - 1, rel=1e-6)
