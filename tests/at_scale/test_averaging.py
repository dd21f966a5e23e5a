"""An all-reduce by nodes; averaging models is DDP where it happens after every step."""

import pytest
import torch
from torch import nn

from mgpu_tutorial.at_scale import averaging


@pytest.mark.parametrize("world_size, per_node", [(4, 4), (6, 2), (4, 1)])
def test_every_rank_has_the_sum(ranks, world_size, per_node):
    expected = [sum(i + rank for rank in range(world_size)) for i in range(36)]
    for found in ranks(world_size, averaging.sum_by_node, per_node, 36).results:
        assert found.tolist() == expected


def test_a_part_of_the_bytes_crosses_per_card(ranks):
    """64 numbers of 8 bytes on two nodes of two: each rank adds up a half with one other."""
    report = ranks(4, averaging.sum_by_node, 2, 64, trace=True)
    calls = [(e.rank, e.nbytes, list(e.group)) for e in report.events if e.op == "all_reduce"]
    halves = [(0, 256, [0, 2]), (1, 256, [1, 3]), (2, 256, [0, 2]), (3, 256, [1, 3])]
    assert sorted(calls) == halves


GENERATOR = torch.Generator().manual_seed(0)
DATA = torch.randn(4, 8, 32, 16, generator=GENERATOR, dtype=torch.float64)


def one_process(data):
    """The same model and SGD on the data of all ranks together."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    for step in range(8):
        x = torch.cat([rows[step] for rows in data])
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.data -= 0.1 * gradient
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize("world_size", [1, 4])
def test_models_averaged_after_every_step_are_those_of_one_process(ranks, world_size):
    data = DATA[:world_size]
    for found in ranks(world_size, averaging.local_sgd, 1, data).results:
        assert torch.allclose(found, one_process(data), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("every", "times"), [(1, 8), (4, 2), (8, 1)])
def test_models_travel_once_in_so_many_steps(ranks, every, times):
    report = ranks(4, averaging.local_sgd, every, DATA, trace=True)
    sent = sum(e.nbytes for e in report.events if e.rank == 0)
    assert sent == times * 8 * (16 * 64 + 64 + 64 + 1)
    first, *others = report.results
    assert all(torch.equal(first, other) for other in others)
    far = (first - one_process(DATA)).abs().max()
    assert (far < 1e-12) == (every == 1)
