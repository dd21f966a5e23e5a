"""Averaging models is DDP where it happens after every step, and only there."""

import pytest
import torch

from mgpu_tutorial.at_scale import fewer, figures


@pytest.mark.parametrize("world_size", [1, 4])
def test_models_averaged_after_every_step_are_those_of_one_process(ranks, world_size):
    expected = figures.one_process(world_size)
    for found in ranks(world_size, fewer.local_sgd, 1).results:
        assert torch.allclose(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("every", "times"), [(1, 8), (4, 2), (8, 1)])
def test_models_travel_once_in_so_many_steps(ranks, every, times):
    report = ranks(4, fewer.local_sgd, every, trace=True)
    sent = sum(e.nbytes for e in report.events if e.rank == 0)
    assert sent == times * 8 * (16 * 64 + 64 + 64 + 1)
    first, *others = report.results
    assert all(torch.equal(first, other) for other in others)
    far = (first - figures.one_process()).abs().max()
    assert (far < 1e-12) == (every == 1)
