"""Ranks are processes, and there are several ways to start and join them."""

import os
from multiprocessing import get_context

import pytest
import torch.multiprocessing as mp

from mgpu_tutorial import processes_and_ranks as par
from mgpu_tutorial.lab import launch


def test_each_rank_says_who_it_is():
    first = launch(par.who_am_i, 3, device="cpu").stdout[2].splitlines()
    assert first == ["rank 2 of 3", "local rank 2", "backend gloo", "device cpu"]


def test_each_rank_is_a_process_of_its_own():
    assert len({os.getpid(), *launch(par.process_id, 3).results}) == 4


def test_ranks_meet_by_environment_and_by_file(tmp_path):
    expected = ["rank 0 of 2", "rank 1 of 2"]
    by_port = launch(par.by_environment, 2, par.free_port(), backend="none")
    by_file = launch(par.by_file, 2, str(tmp_path / "meet"), backend="none")
    assert by_port.results == by_file.results == expected


def test_local_ranks_count_the_visible_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3")
    results = launch(par.which_gpu, 3, device="cpu").results
    assert results[2] == "local rank 2, cuda:2, is GPU 3"


def test_gloo_has_every_operation_on_cpu():
    assert all(launch(par.try_operations, 2, device="cpu").results[0].values())


def test_mp_spawn_divides_batch_and_loaders(tmp_path):
    answers = get_context("spawn").SimpleQueue()
    mp.spawn(par.main_worker, (2, str(tmp_path / "meet"), 128, 5, answers), nprocs=2)
    said = sorted(answers.get() for _ in range(2))
    assert said == [f"rank {r}: 64 samples a step, 3 loader processes" for r in range(2)]


@pytest.mark.parametrize("colours", ["FORCE_COLOR", "PYTHON_COLORS"])
def test_a_function_that_cannot_be_imported_cannot_be_spawned(monkeypatch, colours):
    def local():
        """Pickled by name, and the name cannot be looked up."""

    local.__module__ = local.__qualname__ = "__main__"
    __import__("__main__").__dict__["__main__"] = local
    monkeypatch.setenv(colours, "1")  # from Python 3.13 on, tracebacks have colours
    assert par.spawn_alone(local).startswith("exit code 1, AttributeError: ")
    assert par.spawn_alone(par.free_port) == "exit code 0, no complaint"
    assert os.environ[colours] == "1"
