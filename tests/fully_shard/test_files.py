"""Weights go in and out bit by bit, on any number of ranks, and training goes on."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

from mgpu_tutorial.fully_shard import figures, files, units
from tests.fully_shard.reference import new_model, train


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("weights") / "start.pt")
    torch.save(new_model(torch.float32).state_dict(), path)
    return path


def read(rank, world_size, path):
    return [[p.full_tensor() for p in load(path).parameters()] for load in figures.LOADS]


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_way_to_load_gives_the_weights_of_the_file(ranks, start, world_size):
    expected = list(new_model(torch.float32).parameters())
    for found in ranks(world_size, read, start).results:
        torch.testing.assert_close(found, [expected] * 3, rtol=0, atol=0)


def write_whole(model, optimizer, path):
    """All ranks gather weights and moments, and rank 0 writes them into one ordinary file."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:  # the others have got nothing
        torch.save({"model": weights, "optimizer": state}, path)


def save_once(rank, world_size, folder, whole):
    model = units.new_model()
    units.shard_blocks(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    units.loss_of(model, units.share_of_batch(rank, world_size)).backward()
    optimizer.step()
    files.save(model, optimizer, folder)
    write_whole(model, optimizer, whole)


def resume_once(rank, world_size, folder, whole):
    model = files.empty_model(units.new_model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    files.resume(model, optimizer, folder)
    write_whole(model, optimizer, whole)


@pytest.mark.slow
def test_three_ranks_resume_what_two_have_saved(ranks, tmp_path):
    shards, *whole = (str(tmp_path / name) for name in ("shards", "saved", "resumed"))
    ranks(2, save_once, shards, whole[0])
    ranks(3, resume_once, shards, whole[1])
    saved, resumed = map(torch.load, whole)
    torch.testing.assert_close(resumed["model"], saved["model"], rtol=0, atol=0)
    moments = (file["optimizer"]["state"] for file in (resumed, saved))
    torch.testing.assert_close(*moments, rtol=0, atol=0)


@pytest.mark.slow
def test_the_whole_file_holds_what_one_process_would_save(ranks, tmp_path):
    whole = str(tmp_path / "whole.pt")
    ranks(2, save_once, str(tmp_path / "shards"), whole)
    saved, model = torch.load(whole), new_model(torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model)
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(saved["model"][name], p, rtol=0, atol=1e-5)
        for key in ("exp_avg", "exp_avg_sq"):
            moment = saved["optimizer"]["state"][name][key]
            torch.testing.assert_close(moment, optimizer.state[p][key])
