"""A script is run by torchrun, and nothing of it stays."""

import os

import pytest

from mgpu_tutorial.processes_and_ranks import figures
from mgpu_tutorial.processes_and_ranks.hello import hello


def stub(): ...


@pytest.mark.slow
@pytest.mark.parametrize("function", [hello, stub])
def test_torchrun_runs_the_script_or_ours_and_leaves_nothing(capsys, function):
    before = os.listdir()
    figures.torchrun(function, 2)
    text, said = capsys.readouterr().out.split("$ torchrun --nproc-per-node 2 hello.py\n")
    assert ("not filled in" in text) == (function is stub)
    assert said.splitlines() == [f"rank {r} of 2, all ranks add up to 1" for r in range(2)]
    assert os.listdir() == before
