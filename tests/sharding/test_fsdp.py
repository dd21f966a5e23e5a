"""What the chapter says of PyTorch's fully_shard."""

import tempfile
from functools import cache

import pytest
import torch

from mgpu_tutorial.lab import launch, pretend
from mgpu_tutorial.sharding import fsdp, measurements, training
from tests.sharding import ranks
from tests.thorough import thorough

PER_BLOCK = 4 * (4 * 32 + 4 * 32**2 + 2 * 4 * 32**2 + 4 * 32 + 32)  # bytes
OUTSIDE = 4 * (2 * 64 * 32 + 2 * 32)


@cache
def facts():
    """What one launch of two ranks says."""
    names = ("block by block", "only the root", "last block forgotten")
    workers = {name: (measurements.watch_gathered, fsdp.WAYS[name][0]) for name in names}
    workers |= {
        "too early": (fsdp.optimizer_too_early,),
        "drift": (measurements.drift_apart, fsdp.forget_the_root),
        "no drift": (measurements.drift_apart, fsdp.block_by_block),
        "clip": (fsdp.clip,),
        "short": (fsdp.train_in_short,),
    }
    return launch(ranks.run_all, 2, workers).results


@cache
def alone():
    """What one process says."""
    workers = {"norm": (training_norm,)}
    workers |= {steps: (training.train, training.zero_0, steps) for steps in (5, 6)}
    return launch(ranks.run_all, 1, workers).results[0]


def test_what_is_whole_follows_from_the_units():
    for found in facts():
        assert found["block by block"] == [OUTSIDE + PER_BLOCK] * 2
        assert found["only the root"] == [OUTSIDE + 2 * PER_BLOCK] * 2
        forgotten = [OUTSIDE + 2 * PER_BLOCK, OUTSIDE + PER_BLOCK]
        assert found["last block forgotten"] == forgotten


def test_an_optimizer_made_too_early_trains_nothing():
    for found in facts():
        first, last = found["too early"]
        assert first == last


def test_without_the_root_the_ranks_drift_apart():
    assert [found["no drift"] for found in facts()] == [0.0] * 2
    assert facts()[0]["drift"] == 0.0 and facts()[1]["drift"] > 1e-3


def test_clipping_takes_the_norm_of_all_ranks():
    for found in facts():
        before, after = found["clip"]
        assert before == pytest.approx(alone()["norm"], rel=1e-5) and after == pytest.approx(
            0.1
        )


def training_norm(rank, world_size):
    """The norm in one process, of the batch of all ranks."""
    model = training.new_model()
    training.loss_of(model, 0, 0, 1).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()


def test_every_step_and_every_rank_has_sequences_of_its_own():
    model = training.new_model()
    with torch.no_grad():
        whole = [training.loss_of(model, step, 0, 1).item() for step in range(3)]
        shares = [training.loss_of(model, 2, rank, 4).item() for rank in range(4)]
    assert len({*whole, *shares}) == 7
    assert sum(shares) / 4 == pytest.approx(whole[2])


def test_in_short_numbers_the_shards_stay_long():
    for found in facts():
        short, long = torch.bfloat16, torch.float32
        assert found["short"] == {
            "computes with": short,
            "input": short,
            "keeps": long,
            "gradient": long,
        }


@thorough
def test_a_mesh_of_groups_and_a_checkpoint_train_as_one_process():
    five, six = alone()[5], alone()[6]
    for found in launch(fsdp.train_on_a_mesh, 4).results:
        torch.testing.assert_close(found, five, rtol=0, atol=1e-4)
    with tempfile.TemporaryDirectory() as folder:
        launch(fsdp.save, 2, folder)
        loaded = launch(fsdp.load, 3, folder, steps=1).results
    for found in loaded:
        torch.testing.assert_close(found, six, rtol=0, atol=1e-4)
        assert any(not torch.equal(found[name], five[name]) for name in five)


def test_many_ranks_gather_each_block_twice_and_the_root_once():
    seen = pretend(fsdp.step_of_a_giant, 1024, 3, world_size=128)
    block = 4 * 1024 + 4 * 1024**2 + 8 * 1024**2 + 4 * 1024 + 1024
    root = (50_304 + 64) * 1024 + 2 * 1024
    assert seen.returned["parameters"] == 3 * block + root
    assert seen.calls == {"all_gather": 7, "reduce_scatter": 4}
    padding = (128 - 64) * 1024  # 64 positions for 128 ranks; all else divides
    assert seen.nbytes["reduce_scatter"] == 4 * (3 * block + root + padding)
    assert seen.nbytes["all_gather"] == 4 * (6 * block + root + padding)
