"""The trace of a launch: what it sees, and the file that other programs draw from it."""

import json
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.lab import RanksHung, launch, note, span


def shard(rank, world_size):
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model(torch.ones(2, 8)).sum().backward()


def split_columns_and_rows(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    parallelize_module(model, init_device_mesh("cpu", (world_size,)), plan)
    model(torch.ones(2, 8))


def call_both_names(rank, world_size):
    mine, all_of_them = torch.ones(2), torch.zeros(2 * world_size)
    dist.all_gather_single(all_of_them, mine)
    dist.reduce_scatter_single(mine, all_of_them)


def talk(rank, world_size):
    with span("a step"):
        note("begins")
        if rank == 0:
            dist.send(torch.ones(3), dst=1, tag=7)
        else:
            dist.recv(torch.ones(3), src=0, tag=7)
    dist.all_reduce(torch.ones(2), async_op=True).wait()


def wait_for_ever(rank, world_size):
    if rank == 0:
        dist.recv(torch.zeros(1), src=1)
    time.sleep(60)


def seen(worker):
    events = launch(worker, 2, device="cpu", trace=True).events
    assert {event.group for event in events} == {(0, 1)}
    return [event.op for event in events if event.rank == 0]


def test_the_collectives_of_fully_shard_are_seen():
    gathers, scatters = ["all_gather_single"] * 4, ["reduce_scatter_single"] * 2
    assert sorted(seen(shard)) == gathers + scatters  # twice forward, twice backward


def test_the_collectives_of_tensor_parallelism_are_seen():
    assert seen(split_columns_and_rows) == ["all_reduce"]


def test_the_names_of_today_are_seen():
    assert seen(call_both_names) == ["all_gather_single", "reduce_scatter_single"]


def test_the_file_for_perfetto_has_every_call(tmp_path):
    report = launch(talk, 2, device="cpu", trace=True)
    report.perfetto(tmp_path / "run.json")
    written = json.loads((tmp_path / "run.json").read_text())["traceEvents"]

    def those(phase, rank):
        return [e for e in written if e["ph"] == phase and e["pid"] == rank]

    for rank, p2p in enumerate(["send", "recv"]):
        assert those("M", rank)[0]["args"] == {"name": f"rank {rank}"}
        slices = those("X", rank)
        assert [e["name"] for e in slices] == ["a step", p2p, "all_reduce", "wait"]
        step, message, reduce, _ = slices
        assert message["args"]["peer"] == 1 - rank and message["args"]["tag"] == 7
        assert message["args"]["bytes"] == 12 and reduce["args"]["group"] == [0, 1]
        end = step["ts"] + step["dur"]
        assert step["ts"] <= message["ts"] <= message["ts"] + message["dur"] <= end
        assert [e["name"] for e in those("i", rank)] == ["begins"]
        assert [e["name"] for e in those("b", rank) + those("e", rank)] == [
            "all_reduce in flight"
        ] * 2
    (begin,), (end,) = those("s", 0), those("f", 1)
    assert begin["id"] == end["id"] and begin["cat"] == end["cat"]
    assert those("s", 1) == those("f", 0) == []


def test_a_call_that_never_came_back_is_open_in_the_file(tmp_path):
    with pytest.raises(RanksHung) as caught:
        launch(wait_for_ever, 2, device="cpu", trace=True, timeout=0.5)
    caught.value.report.perfetto(tmp_path / "run.json")
    written = json.loads((tmp_path / "run.json").read_text())["traceEvents"]
    assert [(e["name"], e["pid"]) for e in written if e["ph"] == "B"] == [("recv", 0)]
