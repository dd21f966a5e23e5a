"""Whose GPU is whose on a second node, and what torchrun says of an error."""

import pytest

from mgpu_tutorial.processes_and_ranks import figures, meeting


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


def test_the_film_of_the_meeting_ends_with_a_rank_that_is_missing():
    frames = figures.rendezvous().frames
    entries = [frame.svg().count(" is at node") for frame in frames]
    assert entries == [0, 4, 4, 3]
    assert "never came" in frames[-1].svg() and "rank 3 never comes" in frames[-1].text
