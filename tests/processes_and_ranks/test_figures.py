"""A script is run by torchrun, and nothing of it stays."""

import os

import pytest

from mgpu_tutorial.processes_and_ranks import figures
from mgpu_tutorial.processes_and_ranks.hello import hello


@pytest.mark.slow
def test_torchrun_runs_what_was_written_and_leaves_nothing(capsys):
    before = os.listdir()
    figures.torchrun(hello, 2)
    *_, command, first, second = capsys.readouterr().out.splitlines()
    assert command == "$ torchrun --nproc-per-node 2 hello.py"
    assert [first, second] == [f"rank {r} of 2, all ranks add up to 1" for r in range(2)]
    assert os.listdir() == before
