"""A run that loses a process, or a whole node, ends with the bits of an undisturbed one."""

import pytest
import torch

from mgpu_tutorial.lab import launch
from mgpu_tutorial.when_it_breaks import elastic, measurements

LIMIT = 170.0  # seconds: each node imports PyTorch four times, on a busy machine


def parameters(folder):
    state = torch.load(folder / "run.pt", weights_only=True)
    assert state["step"] == elastic.STEPS
    return state["model"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert launch(elastic.train, 2, str(folder)).results == [0, 0]
    return parameters(folder)


def assert_same_bits(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.fresh
@pytest.mark.timeout(240)
def test_a_worker_that_is_killed_costs_two_steps_and_no_bit(tmp_path, undisturbed):
    ends = measurements.run_two_nodes(str(tmp_path), "worker", LIMIT)
    assert [end.code for end in ends] == [0, 0], [end.errors for end in ends]
    said = sorted(ends[0].lines + ends[1].lines)
    assert said == [f"rank {r} has trained steps 6 to 11" for r in (0, 1)]
    assert any("exitcode: -9" in end.errors for end in ends)
    assert_same_bits(parameters(tmp_path), undisturbed)


@pytest.mark.fresh
@pytest.mark.timeout(240)
def test_a_node_that_leaves_and_comes_back_costs_no_bit(tmp_path, undisturbed):
    first, lost, again = measurements.run_two_nodes(str(tmp_path), "node", LIMIT)
    assert lost.code == -9 and lost.lines == []
    assert first.code == again.code == 0, first.errors + again.errors
    said = sorted(first.lines + again.lines)
    assert said == [f"rank {r} has trained steps 6 to 11" for r in (0, 1)]
    assert_same_bits(parameters(tmp_path), undisturbed)


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
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(undisturbed[name], tensor, rtol=1e-4, atol=1e-5)


def test_a_second_start_goes_on_and_a_third_has_nothing_to_do(tmp_path, undisturbed):
    for first in (0, 12):
        assert launch(elastic.train, 2, str(tmp_path)).results == [first, first]
    assert_same_bits(parameters(tmp_path), undisturbed)


def test_no_two_batches_are_the_same():
    batches = [elastic.batch_of(step, rank)[0] for step in range(12) for rank in range(4)]
    assert len({tuple(b.flatten().tolist()) for b in batches}) == 48
    again = elastic.batch_of(3, 1)
    assert torch.equal(again[0], batches[13])
    assert torch.equal(again[1], (again[0] ** 2).sum(1, keepdim=True))
