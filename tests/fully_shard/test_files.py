"""Weights go in and out bit by bit, on any number of ranks, and training goes on."""

import pytest
import torch

from mgpu_tutorial.fully_shard import figures, files, units
from tests.fully_shard.reference import adam_steps, new_model


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    path = str(tmp_path_factory.mktemp("weights") / "start.pt")
    torch.save(new_model(torch.float32).state_dict(), path)
    return path


@pytest.fixture(scope="module")
def saved(ranks, start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    path = str(folder / "whole.pt")
    return str(folder), path, ranks(2, files.save, start, str(folder), path).results


def read(rank, world_size, path, load):
    return units.whole_values(load(path))


@pytest.mark.parametrize("load", [figures.every_rank_reads, figures.rank_0_sends])
@pytest.mark.parametrize("world_size", [1, 3])
def test_each_way_to_load_gives_the_weights_of_the_file(ranks, start, world_size, load):
    expected = dict(new_model(torch.float32).named_parameters())
    for way in (load, figures.each_rank_maps):
        for found in ranks(world_size, read, start, way).results:
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_mapped_file_needs_no_whole_copy(ranks, start):
    whole = 4 * 41_888
    most = ranks(4, figures.peak_of, start, figures.each_rank_maps).results
    assert whole / 4 < max(most) < whole / 3
    assert (
        min(ranks(4, figures.peak_of, start, figures.every_rank_reads).results) >= 2 * whole
    )


def test_two_ranks_save_what_one_process_has_after_five_steps(saved):
    _, path, results = saved
    for found in results:
        torch.testing.assert_close(found, adam_steps(5), rtol=0, atol=1e-3)
    whole = torch.load(path)
    for name, value in results[0].items():
        assert torch.equal(whole[name], value)
    new_model(torch.float32).load_state_dict(whole)


def test_three_ranks_go_on_with_the_moments(ranks, saved):
    folder, _, results = saved
    for found in ranks(3, files.resume, folder).results:
        torch.testing.assert_close(found, results[0], rtol=0, atol=0)
    for found in ranks(3, files.resume, folder, steps=2).results:
        torch.testing.assert_close(found, adam_steps(7), rtol=0, atol=2e-3)
