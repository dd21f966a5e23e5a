"""Weights go in and out bit by bit, on any number of ranks, and training goes on."""

import pytest
import torch

from mgpu_tutorial.fully_shard import figures
from tests.fully_shard.reference import adam_step, new_model


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
def test_three_ranks_read_what_two_have_saved(ranks, start, tmp_path):
    folder, (saved, resumed) = str(tmp_path / "shards"), [str(tmp_path / n) for n in "ab"]
    ranks(2, figures.save_once, start, folder, saved)
    ranks(3, figures.resume_once, folder, resumed)
    saved, resumed = torch.load(saved), torch.load(resumed)
    model, optimizer = adam_step()
    for name, p in model.named_parameters():
        moments = [state["optimizer"]["state"][name] for state in (saved, resumed)]
        assert torch.equal(saved["model"][name], resumed["model"][name])
        torch.testing.assert_close(saved["model"][name], p, rtol=0, atol=1e-5)
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(moments[0][key], moments[1][key])
            torch.testing.assert_close(moments[0][key], optimizer.state[p][key])
