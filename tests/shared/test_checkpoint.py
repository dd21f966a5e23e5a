"""All ranks go on from what rank 0 saved; a file is replaced whole, or not at all."""

import os

import pytest
import torch
from torch import nn

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.shared import checkpoint


def new_run(seed=0):
    torch.manual_seed(seed)
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        model(torch.arange(3.0) - step).square().sum().backward()
        optimizer.step()


def save_and_go_on(rank, world_size, folder):
    """Only rank 0 has the folder: no disk is common to the ranks."""
    path = f"{folder}/run.pt" if rank == 0 else "/nowhere/run.pt"
    model, optimizer = new_run()
    train(model, optimizer, range(2))
    checkpoint.save(path, model, optimizer, epoch=4, seed=7)
    model, optimizer = new_run(seed=1 + rank)
    also = checkpoint.load(path, model, optimizer, seed=7)
    train(model, optimizer, range(2, 4))
    return also, model.weight.tolist(), os.listdir(folder)


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_goes_on_on_all_ranks_as_if_it_had_not_stopped(ranks, tmp_path, world_size):
    model, optimizer = new_run()
    train(model, optimizer, range(4))
    expected = {"epoch": 4, "seed": 7}, model.weight.tolist(), ["run.pt"]
    report = ranks(world_size, save_and_go_on, str(tmp_path))
    assert report.results == [expected] * world_size


def load(rank, world_size, path, **same):
    model, optimizer = new_run()
    also = checkpoint.load(path, model, optimizer, **same)
    return also, torch.equal(model.weight, new_run()[0].weight)


def test_without_a_file_a_run_begins(ranks, tmp_path):
    assert ranks(2, load, str(tmp_path / "run.pt")).results == [({}, True)] * 2


def save(rank, world_size, path):
    checkpoint.save(path, *new_run(), seed=7)


def test_a_checkpoint_of_a_run_with_another_setting_is_refused_on_all_ranks(ranks, tmp_path):
    path = str(tmp_path / "run.pt")
    ranks(2, save, path)
    with pytest.raises(RankFailed, match="ranks 0 and 1 .* saved with seed=7, now seed=8"):
        ranks(2, load, path, seed=8)
    with pytest.raises(RankFailed, match="saved with other=None, now other=1"):
        ranks(2, load, path, other=1)


def test_a_draft_that_a_crash_left_or_a_link_is_replaced(ranks, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("mine")
    (tmp_path / "run.pt.draft").symlink_to(elsewhere)
    ranks(1, save, str(tmp_path / "run.pt"))
    assert elsewhere.read_text() == "mine" and (tmp_path / "run.pt").is_file()
    assert not (tmp_path / "run.pt.draft").exists()


@pytest.mark.parametrize("content", [b"torn", {"model": {}}, [1]], ids=str)
def test_what_is_no_checkpoint_is_refused_and_left_alone(ranks, tmp_path, content):
    path = tmp_path / "run.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    before = path.read_bytes()
    with pytest.raises(RankFailed, match="holds no readable checkpoint"):
        ranks(1, load, str(path))
    assert path.read_bytes() == before


def test_a_folder_that_is_not_there_is_said_at_once(ranks, tmp_path):
    with pytest.raises(RankFailed, match="no folder .* that can be written to"):
        ranks(1, load, str(tmp_path / "none" / "run.pt"))


def crash_while_saving(rank, world_size, path):
    """Save ones; save twos, but the disk is full after half of it; load what is there."""
    model, optimizer = new_run()
    nn.init.ones_(model.weight)
    checkpoint.save(path, model, optimizer, epoch=1)
    nn.init.constant_(model.weight, 2.0)
    whole_save = torch.save

    def half_save(state, file):
        whole_save(state, file)
        file.truncate(100)
        raise OSError("no space left on device")

    torch.save = half_save
    try:
        checkpoint.save(path, model, optimizer, epoch=2)
    except OSError as error:
        message = str(error)
    torch.save = whole_save  # a broadcast of objects uses it too
    also = checkpoint.load(path, model, optimizer)
    weights = model.weight.tolist()
    checkpoint.save(path, model, optimizer, epoch=3)
    return message, also, weights, checkpoint.load(path, model, optimizer)


def test_a_crash_while_saving_leaves_the_old_file_and_the_next_save_succeeds(ranks, tmp_path):
    results = ranks(1, crash_while_saving, str(tmp_path / "run.pt")).results
    ones = [[1.0, 1.0, 1.0]]
    assert results == [("no space left on device", {"epoch": 1}, ones, {"epoch": 3})]
