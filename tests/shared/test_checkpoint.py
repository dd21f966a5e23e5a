"""All ranks go on from what rank 0 saved; a file is replaced whole, or not at all."""

import os

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD

from mgpu_tutorial.experts.parallel import ExpertParallel
from mgpu_tutorial.sharding.stages import ShardedOptimizer
from mgpu_tutorial.shared import checkpoint
from mgpu_tutorial.tensor_parallel.layers import ColumnParallelLinear


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
    before = checkpoint.load(path, model, optimizer, seed=7)
    train(model, optimizer, range(2))
    checkpoint.save(path, model, optimizer, epoch=4, seed=7)
    model, optimizer = new_run(seed=1 + rank)
    also = checkpoint.load(path, model, optimizer, seed=7)
    train(model, optimizer, range(2, 4))
    return before, also, model.weight.tolist()


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_run_goes_on_on_all_ranks_as_if_it_had_not_stopped(ranks, tmp_path, world_size):
    model, optimizer = new_run()
    train(model, optimizer, range(4))
    expected = {}, {"epoch": 4, "seed": 7}, model.weight.tolist()
    report = ranks(world_size, save_and_go_on, str(tmp_path))
    assert report.results == [expected] * world_size
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def load(rank, world_size, path, **same):
    return checkpoint.load(path, *new_run(), **same)


@pytest.mark.parametrize("content", [b"torn", b"", {"model": {}}, [1]], ids=str)
def test_what_is_no_checkpoint_is_refused_and_left_alone(refused, tmp_path, content):
    path = tmp_path / "run.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    before = path.read_bytes()
    refused(2, "no readable checkpoint", load, str(path), sent=True)
    refused(2, "no folder", load, str(tmp_path / "none" / "run.pt"), sent=True)
    assert path.read_bytes() == before


def load_another(rank, world_size, path, what):
    model, optimizer = new_run()
    train(model, optimizer, range(1))
    checkpoint.save(path, model, optimizer, seed=7)
    dist.barrier()
    model, optimizer = new_run(seed=1)
    if what == "optimizer":
        optimizer = torch.optim.Adam(model.parameters())
    if what == "decay":
        train(model, adam := torch.optim.AdamW(model.parameters()), range(1))
        checkpoint.save(path, model, adam, seed=7)
        dist.barrier()
        optimizer = torch.optim.Adam(model.parameters(), weight_decay=0.01)
    if what == "order":
        optimizer = torch.optim.SGD(list(model.parameters())[::-1], lr=0.1, momentum=0.9)
    if what == "model":
        model = nn.Linear(4, 1)
    if what == "dtype":
        model.double()
    before = model.weight.detach().clone()
    try:
        checkpoint.load(path, model, optimizer, seed=8 if what == "seed" else 7)
    finally:
        assert torch.equal(model.weight, before)  # nothing was changed


@pytest.mark.parametrize(
    "what, words",
    [
        ("model", "another model. Nothing was changed"),
        ("optimizer", "another optimizer. Nothing was changed"),
        ("decay", "another optimizer. Nothing was changed"),
        ("dtype", "another model. Nothing was changed"),
        ("order", "another optimizer. Nothing was changed"),
        ("seed", "saved with seed=7, now seed=8 is asked for"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_on_every_rank(refused, tmp_path, what, words):
    refused(2, words, load_another, str(tmp_path / "run.pt"), what, sent=True)


def test_a_crash_while_saving_leaves_the_old_file(tmp_path, monkeypatch):
    path = str(tmp_path / "run.pt")
    checkpoint.save_whole(path, {"epoch": 1})
    monkeypatch.setattr(torch, "save", lambda state, file: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpoint.save_whole(path, {"epoch": 2})
    assert torch.load(path) == {"epoch": 1}
    assert os.listdir(tmp_path) == ["run.pt"]  # a draft would keep a full disk full


def test_two_runs_that_save_at_once_do_not_write_into_one_draft(tmp_path, monkeypatch):
    path, save = str(tmp_path / "run.pt"), torch.save

    def meet(state, file):
        if state == {"run": 1}:  # the other run saves meanwhile
            checkpoint.save_whole(path, {"run": 2})
            assert torch.load(path) == {"run": 2}
        save(state, file)

    monkeypatch.setattr(torch, "save", meet)
    checkpoint.save_whole(path, {"run": 1})
    assert torch.load(path) == {"run": 1}
    assert os.listdir(tmp_path) == ["run.pt"]


def load_where_rank_1_differs(rank, world_size, path, what):
    checkpoint.save(path, *new_run(), seed=7)
    dist.barrier()
    model, optimizer = new_run(seed=1)
    before = model.weight.detach().clone()
    wrong = nn.Linear(4, 1) if what == "model" and rank else model
    try:
        checkpoint.load(path, wrong, optimizer, seed=8 if what == "seed" and rank else 7)
    finally:
        assert torch.equal(model.weight, before)  # on rank 0 too


@pytest.mark.parametrize("what, words", [("model", "another model"), ("seed", "now seed=8")])
def test_what_one_rank_refuses_no_rank_loads(refused, tmp_path, what, words):
    path = str(tmp_path / "run.pt")
    refused(2, words, load_where_rank_1_differs, path, what, sent=True)


def save_what_differs(rank, world_size, path, kind):
    """Nothing of it is marked as a shard: rank 0's file would be loaded by all."""
    torch.manual_seed(0)
    if kind == "experts":
        model = ExpertParallel(4, 1)
    elif kind == "a cut layer":
        model = ColumnParallelLinear(nn.Linear(4, 4))
    elif kind == "drifted":
        torch.manual_seed(rank)
        model = nn.Linear(4, 4)
    else:  # two equal layers, of which each rank steps one
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.Adam(model.parameters())
    if kind == "ZeRO 1":
        optimizer = ShardedOptimizer(model.parameters(), torch.optim.Adam)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer = optimizer.inner
    checkpoint.save(path, model, optimizer)


@pytest.mark.parametrize("kind", ["experts", "a cut layer", "drifted", "ZeRO 1"])
def test_what_differs_by_rank_is_not_saved_as_if_it_were_rank_0s(refused, tmp_path, kind):
    words = "rank 1 has other parameters or another optimizer state than rank 0"
    if kind in ("experts", "a cut layer"):  # they know that they are parts
        words = "rank 0 would write its own part only: of sharded blocks"
    refused(2, words, save_what_differs, str(tmp_path / "run.pt"), kind, sent=True)
    assert not list(tmp_path.iterdir())


def use_dtensors(rank, world_size, path, call):
    model = nn.Linear(4, 4)
    fully_shard(model)
    call(path, model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("call", [checkpoint.save, checkpoint.load])
def test_dtensors_are_neither_saved_nor_loaded_as_if_whole(refused, call):
    words = "and DTensors torch.distributed.checkpoint"
    refused(2, words, use_dtensors, "/nowhere/unused.pt", call, sent=True)


def save_a_cut_layer(rank, world_size):
    model = ColumnParallelLinear(nn.Linear(4, 4))
    checkpoint.save("/nowhere/unused.pt", model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_rank_0_does_not_save_its_part_of_a_tensor_parallel_layer(refused):
    refused(2, "rank 0 would write its own part only", save_a_cut_layer, sent=True)


def save_a_number_of_numpy(rank, world_size, folder):
    model = nn.Linear(2, 2)
    checkpoint.save(
        f"{folder}/run.pt", model, SGD(model.parameters(), lr=0.1), best=np.float64(0.9)
    )


def save_to(rank, world_size, path):
    model = torch.nn.Linear(2, 2)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter)
    checkpoint.save(path, model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.parametrize("name", [".", "none/run.pt"])
def test_a_folder_is_no_file_to_save_into(refused, tmp_path, name):
    refused(2, "give the path of a file", save_to, str(tmp_path / name), sent=True)


def test_what_could_not_be_loaded_again_is_not_saved(refused, tmp_path):
    words = "best is a numpy.float64, and a checkpoint that has one can't be loaded again"
    refused(2, words, save_a_number_of_numpy, str(tmp_path), sent=True)
    assert list(tmp_path.iterdir()) == []
