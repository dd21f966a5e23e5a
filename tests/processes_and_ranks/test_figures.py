"""A map counts ranks through all nodes; what is spawned or run by torchrun tells its end."""

import os

import pytest

from mgpu_tutorial.processes_and_ranks import figures
from mgpu_tutorial.processes_and_ranks.hello import hello


def test_ranks_run_through_all_nodes_and_gpus_begin_anew_on_each():
    assert repr(figures.cluster_map(2, 3)).split("\n") == [
        "2 nodes with 3 GPUs each: world size 6",
        "node 0: rank 0 on cuda:0, 1 on cuda:1, 2 on cuda:2",
        "node 1: rank 3 on cuda:0, 4 on cuda:1, 5 on cuda:2",
    ]


def stub(): ...


@pytest.mark.slow
@pytest.mark.parametrize("function", [hello, stub])
def test_torchrun_runs_the_script_or_ours_and_leaves_nothing(capsys, tmp_path, function):
    before = os.listdir()
    figures.torchrun(function, 2)
    text, said = capsys.readouterr().out.split("$ torchrun --nproc-per-node 2 hello.py\n")
    assert ("not filled in" in text) == (function is stub)
    assert said.splitlines() == [f"rank {r} of 2, all ranks add up to 1" for r in range(2)]
    assert os.listdir() == before


@pytest.mark.slow
@pytest.mark.parametrize("colours", ["FORCE_COLOR", "PYTHON_COLORS"])
def test_a_function_that_cannot_be_imported_cannot_be_spawned(monkeypatch, colours):
    def local():
        """Pickled by name, and the name cannot be looked up."""

    local.__module__ = local.__qualname__ = "__main__"
    __import__("__main__").__dict__["__main__"] = local
    monkeypatch.setenv(colours, "1")  # from Python 3.13 on, tracebacks have colours
    assert figures.spawn_alone(local).startswith("exit code 1, AttributeError: ")
    assert figures.spawn_alone(os.getcwd) == "exit code 0, no complaint"
    assert os.environ[colours] == "1"
