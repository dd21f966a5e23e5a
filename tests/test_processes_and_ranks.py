"""Ranks are processes, and there are several ways to start and join them."""

import os
import re
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mgpu_tutorial import processes_and_ranks as par
from mgpu_tutorial.lab import RankFailed, launch


def test_each_rank_says_who_it_is():
    first = launch(par.who_am_i, 3, device="cpu").stdout[2].splitlines()
    assert first == ["rank 2 of 3", "local rank 2", "backend gloo", "device cpu"]


def test_each_rank_is_a_process_of_its_own():
    assert len({os.getpid(), *launch(lambda rank, world_size: os.getpid(), 3).results}) == 4


def test_ranks_meet_by_environment_and_wait_for_the_one_that_is_late():
    first, second = launch(par.by_environment, 2, par.free_port(), backend="none").results
    assert second > 0.3 and second - first > 0.2  # rank 0 comes 0.5 s late


def test_the_store_listens_on_loopback_only_and_is_the_one_that_the_group_uses():
    def ports(rank, world_size, port):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        store = par.open_store(port)
        store.set("who", "mine")
        dist.init_process_group("gloo")
        sockets = psutil.Process().net_connections(kind="tcp")
        open_ones = {s.laddr for s in sockets if s.status == "LISTEN" and s.laddr[1] == port}
        client = dist.TCPStore("127.0.0.1", port, is_master=False)
        return [tuple(address) for address in open_ones], client.get("who")

    port = par.free_port()
    [(listening, who)] = launch(ports, 1, port, backend="none").results
    assert listening == [("127.0.0.1", port)] and who == b"mine"


def test_a_rank_that_never_comes_is_counted():
    said = launch(par.one_too_few, 2, par.free_port(), patience=1, backend="none").results
    assert re.fullmatch(
        r"Timed out after \d+ seconds waiting for clients. 2/3 clients joined.", said[0]
    )


def test_local_ranks_count_the_visible_gpus(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3")
    results = launch(par.which_gpu, 3, device="cpu").results
    assert results[2] == "local rank 2, cuda:2, is GPU 3"


def test_a_gpu_that_is_not_visible_belongs_to_nobody(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3")
    with pytest.raises(RankFailed, match="rank 3 raised IndexError"):
        launch(par.which_gpu, 4, device="cpu")


def call_everything(rank, world_size):
    """Two ranks call each operation of a process group once; returns those that failed."""
    one, two = torch.ones(1), torch.ones(2)
    peer, lists = 1 - rank, [torch.ones(1) for _ in range(world_size)]
    root = lists if rank == 0 else None
    message = dist.send if rank == 0 else dist.recv
    calls = {
        "send, recv": lambda: message(one, peer),
        "broadcast": lambda: dist.broadcast(one, 0),
        "all_reduce": lambda: dist.all_reduce(one),
        "reduce": lambda: dist.reduce(one, 0),
        "all_gather": lambda: dist.all_gather(lists, one),
        "gather": lambda: dist.gather(one, root, 0),
        "scatter": lambda: dist.scatter(one, root, 0),
        "reduce_scatter": lambda: dist.reduce_scatter(one, list(two.split(1))),
        "all_to_all": lambda: dist.all_to_all(lists, list(two.split(1))),
        "barrier": lambda: dist.barrier(),
    }
    failed = []
    for name, call in calls.items():
        try:
            call()
        except (RuntimeError, NotImplementedError):
            failed.append(name)
    return failed


def test_gloo_has_every_operation_on_cpu():
    assert launch(call_everything, 2, device="cpu").results == [[], []]


@pytest.mark.fresh
def test_mp_spawn_and_launch_run_the_same_worker(tmp_path):
    mp.spawn(par.main_worker, (2, str(tmp_path / "one"), 128), nprocs=2)
    report = launch(par.main_worker, 2, str(tmp_path / "two"), 128, backend="none")
    assert report.results == ["64 of 128 samples per step"] * 2


def test_a_gpu_is_chosen_by_the_local_rank_and_not_by_the_rank(monkeypatch):
    """Rank 5 of 8 is local rank 1 of the second node, which sees two GPUs."""
    for name, value in {
        "RANK": "5",
        "LOCAL_RANK": "1",
        "CUDA_VISIBLE_DEVICES": "3,2",
    }.items():
        monkeypatch.setenv(name, value)
    assert par.which_gpu(5, 8) == "local rank 1, cuda:1, is GPU 2"


def meet_at(rank, world_size, port):
    """Rank 1 goes to the port itself, and waits there for five seconds at most."""
    if rank == 0:
        return par.by_environment(rank, world_size, port)
    address, wait = f"tcp://127.0.0.1:{port}", timedelta(seconds=5)
    dist.init_process_group("gloo", address, wait, world_size, rank)
    return "rank 1 came"


def test_the_ranks_meet_at_the_port_that_is_given():
    results = launch(meet_at, 2, par.free_port(), backend="none", timeout=20).results
    assert isinstance(results[0], float) and results[1] == "rank 1 came"
