"""Weights go in and out bit by bit, on any number of ranks, and training goes on."""

import pytest
import torch

from mgpu_tutorial.fully_shard import figures
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


def test_the_table_of_a_resumed_run_compares_two_files(monkeypatch):
    def write(worker, ranks, *arguments):
        state = {"w": {"exp_avg": torch.tensor(10.0 * ranks)}}
        both = {"model": {"w": torch.tensor(1.0 * ranks)}, "optimizer": {"state": state}}
        torch.save(both, arguments[-1])

    monkeypatch.setattr(figures, "launch", write)  # 2 ranks save, 3 resume
    assert figures.resume_table().rows == [["parameters", 1], ["moments", 10]]


@pytest.mark.slow
def test_the_whole_file_holds_what_one_process_would_save(ranks, tmp_path):
    whole = str(tmp_path / "whole.pt")
    ranks(2, figures.save_once, str(tmp_path / "shards"), whole)
    saved, model = torch.load(whole), new_model(torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    train(model)
    optimizer.step()
    for name, p in model.named_parameters():
        torch.testing.assert_close(saved["model"][name], p, rtol=0, atol=1e-5)
        for key in ("exp_avg", "exp_avg_sq"):
            moment = saved["optimizer"]["state"][name][key]
            torch.testing.assert_close(moment, optimizer.state[p][key])
