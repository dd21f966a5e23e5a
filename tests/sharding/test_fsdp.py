"""What the chapter says of PyTorch's fully_shard."""

import pytest
import torch

from mgpu_tutorial.lab import pretend
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.sharding import figures, fsdp, training

PER_BLOCK = 4 * (4 * 32 + 4 * 32**2 + 2 * 4 * 32**2 + 4 * 32 + 32)  # bytes
OUTSIDE = 4 * (2 * 64 * 32 + 2 * 32)


@pytest.mark.parametrize(
    ("way", "blocks_there"),
    [
        ("block by block", [1, 1]),
        ("keep until backward", [1, 2]),
        ("only the root", [2, 2]),
        ("last block forgotten", [2, 1]),
    ],
)
def test_what_is_whole_follows_from_the_units(ranks, way, blocks_there):
    shard, settings = fsdp.WAYS[way]
    expected = [OUTSIDE + blocks * PER_BLOCK for blocks in blocks_there]
    assert ranks(2, figures.watch_gathered, shard, **settings).results == [expected] * 2


def test_an_optimizer_made_too_early_trains_nothing(ranks):
    for first, last in ranks(2, fsdp.optimizer_too_early).results:
        assert first == last


def test_clipping_takes_the_norm_of_all_ranks(ranks):
    model = training.new_model()
    training.loss_of(model, 0, 0, 1).backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    for before, after in ranks(2, fsdp.clip).results:
        assert before == pytest.approx(norm, rel=1e-5) and after == pytest.approx(0.1)


def test_other_ranks_go_on_from_a_checkpoint(ranks, tmp_path):
    saved = ranks(2, fsdp.save, str(tmp_path)).results
    five = ranks(1, training.train, training.zero_0, 5).results
    assert largest_difference(saved, five * 2) < 1e-4
    loaded = ranks(3, fsdp.load, str(tmp_path), steps=0).results
    assert largest_difference(loaded, [saved[0]] * 3) == 0
    trained = ranks(3, fsdp.load, str(tmp_path), steps=1).results
    six = ranks(1, training.train, training.zero_0, 6).results
    assert largest_difference(trained, six * 3) < 1e-4
    assert largest_difference(trained[0], five[0]) > 1e-3


def test_many_ranks_gather_each_block_twice_and_the_root_once():
    seen = pretend(fsdp.step_of_a_giant, 1024, 3, world_size=128)
    block = 4 * 1024 + 4 * 1024**2 + 8 * 1024**2 + 4 * 1024 + 1024
    root = (50_304 + 64) * 1024 + 2 * 1024
    padding = (128 - 64) * 1024  # 64 positions for 128 ranks; all else divides
    assert seen.returned["parameters"] == 3 * block + root
    assert seen.returned["on a rank"] == (3 * block + root + padding) // 128
    assert seen.calls == {"all_gather": 7, "reduce_scatter": 4}
    assert seen.nbytes["reduce_scatter"] == 4 * (3 * block + root + padding)
    assert seen.nbytes["all_gather"] == 4 * (6 * block + root + padding)
