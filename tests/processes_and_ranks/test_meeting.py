"""Ranks are processes, and there are several ways to start and join them."""

import re

import pytest

from mgpu_tutorial.processes_and_ranks import figures, meeting


def test_a_rank_that_never_comes_is_counted(ranks):
    port = meeting.free_port()
    said = ranks(2, meeting.one_too_few, port, patience=1, backend="none").results
    counted = r"Timed out after (\d+) seconds waiting for clients. (\d)/(\d) clients joined."
    seconds, came, announced = map(int, re.fullmatch(counted, said[0]).groups())
    assert seconds < 8 and (came, announced) == (2, 3)
    assert "wait timeout" in said[1]


@pytest.mark.parametrize("world_size", [1, 3])
def test_main_worker_adds_up_every_number_once(ranks, tmp_path, world_size):
    path, numbers = str(tmp_path / "meeting"), [3, 4, 5, 60]
    report = ranks(world_size, meeting.main_worker, path, numbers, backend="none", trace=True)
    assert report.results == [72] * world_size
    assert [event.op for event in report.events] == ["all_reduce"] * world_size


def test_a_gpu_is_chosen_by_the_local_rank_and_not_by_the_rank(monkeypatch):
    """As on a second node: the rank and the world size say nothing about this node's GPUs."""
    around = {"CUDA_VISIBLE_DEVICES": "4,1,7", "LOCAL_RANK": "2", "RANK": "10"}
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    assert meeting.which_gpu(10, 16) == "local rank 2, cuda:2, is GPU 7"


def goodbye():
    raise ValueError("nobody is here")


@pytest.mark.slow
def test_of_an_error_under_torchrun_only_its_line_is_printed(capsys):
    figures.torchrun(goodbye, 1)
    _, _, said = capsys.readouterr().out.partition("hello.py\n")
    assert said.splitlines() == ["ValueError: nobody is here"]
