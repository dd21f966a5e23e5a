"""Ranks are processes, and there are several ways to start and join them."""

import os
import re
import socket
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial import processes_and_ranks as par
from mgpu_tutorial.lab import RankFailed, launch


@pytest.mark.parametrize("world_size", [1, 3])
def test_each_rank_says_who_it_is(ranks, world_size):
    report = ranks(world_size, par.who_am_i, device="cpu")
    assert [said.splitlines() for said in report.stdout] == [
        [f"rank {r} of {world_size}", f"local rank {r}", "backend gloo", "device cpu"]
        for r in range(world_size)
    ]


def process_id(rank, world_size):
    return os.getpid()


def test_each_rank_is_a_process_of_its_own(ranks):
    assert len({os.getpid(), *ranks(3, process_id).results}) == 4


def test_a_free_port_can_be_listened_at():
    with socket.create_server(("127.0.0.1", par.free_port())) as taken:
        assert par.free_port() != taken.getsockname()[1]


def test_ranks_meet_by_environment_and_wait_for_rank_0(ranks):
    first, second = ranks(2, par.by_environment, par.free_port(), backend="none").results
    assert second > 0.4 and second - first > 0.2  # rank 0 comes 0.5 s late, and counts none


def meet_at(rank, world_size, port):
    """Rank 1 goes to the port itself, and waits there for five seconds at most."""
    if rank == 0:
        return par.by_environment(rank, world_size, port)
    address, wait = f"tcp://127.0.0.1:{port}", timedelta(seconds=5)
    dist.init_process_group("gloo", address, wait, world_size, rank)
    return "rank 1 came"


def test_the_ranks_meet_at_the_port_that_is_given(ranks):
    results = ranks(2, meet_at, par.free_port(), backend="none", timeout=20).results
    assert isinstance(results[0], float) and results[1] == "rank 1 came"


def ports(rank, world_size, port):
    """The addresses that a rank with a store listens at, and what stands in the store."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    store = par.open_store(port)
    store.set("who", "mine")
    dist.init_process_group("gloo")
    sockets = psutil.Process().net_connections(kind="tcp")
    listening = {s.laddr for s in sockets if s.status == "LISTEN" and s.laddr[1] == port}
    client = dist.TCPStore("127.0.0.1", port, is_master=False)
    return [tuple(address) for address in listening], client.get("who")


def test_the_store_listens_on_loopback_only_and_is_the_one_that_the_group_uses(ranks):
    port = par.free_port()
    [(listening, who)] = ranks(1, ports, port, backend="none").results
    assert listening == [("127.0.0.1", port)] and who == b"mine"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_rank_that_never_comes_is_counted(ranks, world_size):
    said = ranks(
        world_size, par.one_too_few, par.free_port(), patience=1, backend="none"
    ).results
    counted = r"Timed out after (\d+) seconds waiting for clients. (\d)/(\d) clients joined."
    seconds, came, announced = map(int, re.fullmatch(counted, said[0]).groups())
    assert seconds < 8 and (came, announced) == (world_size, world_size + 1)
    assert all("wait timeout" in other for other in said[1:])


@pytest.mark.parametrize("world_size", [2, 3])
def test_main_worker_takes_its_share_and_waits_until_all_have_joined(
    ranks, tmp_path, world_size
):
    path = str(tmp_path / "meeting")
    report = ranks(world_size, par.main_worker, path, 128, backend="none", trace=True)
    assert report.results == [f"{128 // world_size} of 128 samples per step"] * world_size
    everybody = tuple(range(world_size))
    calls = sorted((event.rank, event.op, event.group) for event in report.events)
    assert calls == [(rank, "barrier", everybody) for rank in everybody]


@pytest.mark.slow
def test_mp_spawn_runs_the_same_worker(tmp_path):
    mp.spawn(par.main_worker, (2, str(tmp_path / "meeting"), 128), nprocs=2)


@given(st.lists(st.integers(0, 15), min_size=1, max_size=8, unique=True), st.data())
def test_a_gpu_is_chosen_by_the_local_rank_and_not_by_the_rank(visible, data):
    """As on a second node: the rank and the world size say nothing about this node's GPUs."""
    local_rank = data.draw(st.integers(0, len(visible) - 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, visible)))
        patch.setenv("LOCAL_RANK", str(local_rank))
        patch.setenv("RANK", str(local_rank + 8))
        said = par.which_gpu(local_rank + 8, 16)
    assert said == f"local rank {local_rank}, cuda:{local_rank}, is GPU {visible[local_rank]}"


def test_a_gpu_that_is_not_visible_belongs_to_nobody(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,3")
    last = launch(par.which_gpu, 3, device="cpu").results[2]
    assert last == "local rank 2, cuda:2, is GPU 3"
    with pytest.raises(RankFailed, match="rank 3 raised IndexError"):
        launch(par.which_gpu, 4, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize("colours", ["FORCE_COLOR", "PYTHON_COLORS"])
def test_a_function_that_cannot_be_imported_cannot_be_spawned(monkeypatch, colours):
    def local():
        """Pickled by name, and the name cannot be looked up."""

    local.__module__ = local.__qualname__ = "__main__"
    __import__("__main__").__dict__["__main__"] = local
    monkeypatch.setenv(colours, "1")  # from Python 3.13 on, tracebacks have colours
    assert par.spawn_alone(local).startswith("exit code 1, AttributeError: ")
    assert par.spawn_alone(os.getcwd) == "exit code 0, no complaint"
    assert os.environ[colours] == "1"
