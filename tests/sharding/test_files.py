"""A run that goes on from its shards' files is the run that was never interrupted."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.sharding.blocks import fully_sharded
from mgpu_tutorial.sharding.files import load_shards, save_shards
from mgpu_tutorial.sharding.stages import ShardedModel, ShardedOptimizer, prepare

STAGES = ("ZeRO 1", "ZeRO 2", "ShardedModel", "fully_sharded")


def new_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def new_run(stage, module):
    """What computes the loss, the optimizer of this rank, and its step."""
    if stage.startswith("ZeRO"):
        return prepare(int(stage[-1]), module)
    whole = stage == "ShardedModel"
    model = ShardedModel(module) if whole else fully_sharded(module, [module[2]])
    optimizer = Adam(model.parameters(), lr=0.01)
    return model, optimizer, optimizer.step


def take_steps(run, numbers, rank, world_size):
    model, _, step = run
    for number in numbers:
        model.zero_grad()
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(6, 3, generator=generator, dtype=torch.float64)
        model(x.chunk(world_size)[rank]).square().mean().backward()
        step()
    return model(torch.ones(1, 3).double()).detach()


def go_on(rank, world_size, folder):
    """What each stage makes of three steps, the third of them by a run that was loaded."""
    outputs = []
    for stage in STAGES:
        run = new_run(stage, new_model())
        take_steps(run, (0, 1), rank, world_size)
        save_shards(folder, run[0], run[1], steps=2)
        module = new_model()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        run = new_run(stage, module)
        assert load_shards(folder, run[0], run[1]) == {"steps": 2}
        outputs.append(take_steps(run, (2,), rank, world_size))
    return outputs


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loaded_run_goes_on_as_one_process_does(ranks, world_size, tmp_path):
    model = new_model()
    optimizer = Adam(model.parameters(), lr=0.01)
    expected = take_steps((model, optimizer, optimizer.step), range(3), 0, 1)
    for found in ranks(world_size, go_on, str(tmp_path)).results:
        assert largest_difference(found, [expected] * len(STAGES)) < 1e-12


def two_pairs(rank, world_size, folder):
    """Ranks 0 and 2 train one model, ranks 1 and 3 another; each goes on from its files."""
    group = [dist.new_group(pair) for pair in ([0, 2], [1, 3])][rank % 2]
    outputs = []
    for stage in range(4):
        run = prepare(stage, new_model(rank % 2), group=group)
        take_steps(run, (rank % 2, 2), rank // 2, 2)
        save_shards(folder[rank % 2], run.model, run.optimizer, group=group, steps=2)
        run = prepare(stage, new_model(7), group=group)
        load_shards(folder[rank % 2], run.model, run.optimizer, group=group)
        outputs.append(take_steps(run, (3,), rank // 2, 2))
    return outputs


def test_two_pairs_of_ranks_work_side_by_side(ranks, tmp_path):
    folders = [tmp_path / "even", tmp_path / "odd"]
    for folder in folders:
        folder.mkdir()
    results = ranks(4, two_pairs, [str(folder) for folder in folders]).results
    for rank, found in enumerate(results):
        model = new_model(rank % 2)
        optimizer = Adam(model.parameters(), lr=0.01)
        run = model, optimizer, optimizer.step
        expected = take_steps(run, (rank % 2, 2, 3), 0, 1)
        assert largest_difference(found, [expected] * 4) < 1e-12


def save_once(rank, world_size, folder, steps=1):
    model, optimizer, _ = new_run("fully_sharded", new_model())
    save_shards(folder, model, optimizer, steps=steps)


def load_once(rank, world_size, folder, width=5):
    module = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 3)).double()
    model, optimizer, _ = new_run("fully_sharded", module)
    before = [p.detach().clone() for p in model.parameters()]
    try:
        load_shards(folder, model, optimizer)
    finally:
        assert largest_difference(before, list(model.parameters())) == 0


@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_ranks_finds_no_file(ranks, tmp_path, count):
    ranks(2, save_once, str(tmp_path))
    with pytest.raises(RankFailed, match=f"-of-{count}.pt"):
        ranks(count, load_once, str(tmp_path), timeout=10)


@pytest.mark.parametrize("is_torn", [False, True])
def test_the_rank_whose_file_is_missing_or_torn_raises(ranks, tmp_path, is_torn):
    ranks(2, save_once, str(tmp_path))
    file = tmp_path / "rank-1-of-2.pt"
    part = file.read_bytes()[:100]
    file.unlink()
    if is_torn:
        file.write_bytes(part)
    with pytest.raises(RankFailed, match="rank 1 raised"):
        ranks(2, load_once, str(tmp_path), timeout=10)


@pytest.mark.parametrize("steps", [1, 2])
def test_files_of_two_saves_are_not_mixed(ranks, refused, tmp_path, steps):
    ranks(2, save_once, str(tmp_path))
    file = tmp_path / "rank-1-of-2.pt"
    old = file.read_bytes()
    ranks(2, save_once, str(tmp_path), steps=steps)
    file.write_bytes(old)
    refused(2, ValueError("save", "rank 1"), load_once, str(tmp_path), sent=True)


def test_another_model_is_refused_before_anything_is_loaded(ranks, refused, tmp_path):
    ranks(2, save_once, str(tmp_path))
    refused(2, RuntimeError("size mismatch"), load_once, str(tmp_path), 7, sent=True)


def go_on_by_owner(rank, world_size, folder):
    """A ShardedOptimizer is saved and loaded as the inner one."""
    optimizer = ShardedOptimizer((model := new_model()).parameters(), Adam)
    for number in (1, 2):
        save_shards(folder, model, optimizer, number=number)
        assert load_shards(folder, model, optimizer) == {"number": number}
        take_steps((model, None, optimizer.step), (number,), rank, world_size)
    return len(optimizer.inner.state) > 0


def test_the_optimizer_of_stage_1_is_saved_as_it_is_or_by_its_inner_one(ranks, tmp_path):
    assert ranks(2, go_on_by_owner, str(tmp_path)).results == [True, True]
