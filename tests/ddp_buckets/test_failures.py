"""Modules that differ by rank, a rank that dies, no_sync: all five wrappers alike."""

import os

import pytest
import torch

from mgpu_tutorial.ddp_buckets.experiments import Tower, run_each_setting, shares
from mgpu_tutorial.ddp_buckets.measurements import count_calls
from mgpu_tutorial.ddp_buckets.wrappers import (
    WRAPPERS,
    calling_from_python,
    finish_gradient_synchronization,
    wrap,
)
from mgpu_tutorial.lab import RankFailed, launch, span
from tests.ddp_buckets import ranks as workers

REAL = WRAPPERS[-1]


def wrap_different_modules(rank, world_size, wrapper, width, depth):
    """Rank r wraps a Tower that is r * `width` wider and r * `depth` deeper than rank 0's."""
    wrap(wrapper, Tower(64 + rank * width, 4 + rank * depth))


def die_in_backward(rank, world_size, wrapper):
    """Rank 1 ends in the middle of backward, when its first layer's gradient is computed."""
    model = wrap(wrapper, Tower())
    if rank == 1:
        model.module.body[0].weight.register_hook(lambda gradient: os._exit(1))
    model(torch.randn(4, 64)).sum().backward()
    finish_gradient_synchronization(model)


def accumulate(rank, world_size, wrapper):
    """A batch in three parts: synchronised once to begin with, then each time, then last."""
    model = calling_from_python(wrap(wrapper, Tower(), bucket_cap_mb=0.02))
    (batch,) = shares(rank, world_size, 1, width=64)
    for name in ("warm up", "every", "last"):
        model.zero_grad()
        with span(name):
            first, second, third = batch.chunk(3)
            if name == "last":
                with model.no_sync():
                    for part in (first, second):
                        model(part).square().mean().backward()
            else:
                for part in (first, second):
                    model(part).square().mean().backward()
                    finish_gradient_synchronization(model)
            model(third).square().mean().backward()
            finish_gradient_synchronization(model)


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.__name__)
def test_no_sync_saves_two_calls_of_three(wrapper):
    report = launch(accumulate, 2, wrapper, trace=True)
    assert count_calls(report, "every").count == 3 * count_calls(report, "last").count > 0


def test_our_wrappers_refuse_modules_that_differ_by_rank():
    sizes = {"depth": {"width": 0, "depth": 1}, "width": {"width": 8, "depth": 0}}
    settings = {
        (wrapper, name): {"worker": wrap_different_modules, "wrapper": wrapper} | size
        for wrapper in WRAPPERS[:4]
        for name, size in sizes.items()
    }
    for refused in launch(run_each_setting, 2, workers.tell_refusal, settings).results:
        for wrapper in WRAPPERS[:4]:
            says = refused[wrapper, "depth"], refused[wrapper, "width"]
            assert says[0].startswith("rank 1 has 12 parameters and rank 0 has 10: build")
            assert says[1].startswith("rank 1 has ('head.weight', [10, 72], 'torch.float32')")


@pytest.mark.parametrize(
    "width, depth, says", [(0, 1, "DDP expects same model"), (8, 0, "appears not to match")]
)
def test_torch_refuses_modules_that_differ_by_rank(width, depth, says):
    with pytest.raises(RankFailed, match=says):
        launch(wrap_different_modules, 2, REAL, width=width, depth=depth, timeout=10)


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.__name__)
def test_a_rank_that_dies_in_backward_is_named_and_nobody_hangs(wrapper):
    with pytest.raises(RankFailed, match="rank 1 left with exit code 1") as caught:
        launch(die_in_backward, 2, wrapper, timeout=20)
    assert "  rank 0 was at" in str(caught.value)
