"""What the chapter says of its jobs and does not show."""

import gc
import inspect
import time

import psutil
import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial import launch
from mgpu_tutorial.lab import RankFailed, RanksHung
from mgpu_tutorial.when_it_breaks import data, figures, jobs, server


def test_a_fault_is_a_rank_and_a_line_of_the_file():
    rank, number = figures.fault_of(jobs.average_file)
    line = inspect.getsource(jobs).splitlines()[number - 1]
    assert (rank, line.strip()) == (0, "torch.ones(2**17).numpy().tofile(path)")


def test_commands_run_on_the_cpu_and_loopback_whatever_the_user_has_set(monkeypatch):
    monkeypatch.setattr(figures.subprocess, "run", lambda *_, env, **__: env)
    ours = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": figures.LOOPBACK}
    for name in ours:
        monkeypatch.setenv(name, "theirs")
    found = figures.shell("torchrun job.py", TORCH_FR_BUFFER_SIZE="7")
    assert found.items() >= (ours | {"TORCH_FR_BUFFER_SIZE": "7"}).items()


def test_the_rank_with_the_longest_sequence_waits_least(ranks):
    events = ranks(4, jobs.train_on_sequences, trace=True).events
    waited = [0.0] * 4
    for event in events:
        waited[event.rank] += (event.end - event.begin) * (event.op == "all_reduce")
    assert waited.index(min(waited)) == 3


def add_and_tell(rank, world_size, how):
    """The job in another way: "b" the same order, "c" all calls first and then the waits."""
    samples, rate = torch.tensor([100.0 + rank]), torch.tensor([0.0 if rank else 0.5])
    calls = [(dist.all_reduce, samples), (dist.broadcast, rate, 0)]
    if rank and how == "c":
        calls.reverse()
    works = [call(*given, async_op=how == "c") for call, *given in calls]
    for work in filter(None, works):
        work.wait()
    return samples.item(), rate.item()


@pytest.mark.slow
def test_the_same_order_mends_the_job_and_asynchronous_calls_do_not(ranks):
    assert figures.REMEDY == "b"
    assert ranks(3, add_and_tell, "b").results == [(303.0, 0.5)] * 3
    with pytest.raises((RanksHung, RankFailed)):
        ranks(3, add_and_tell, "c", timeout=2)


@pytest.mark.slow
@pytest.mark.parametrize("run, cause", list(zip("ABCD", figures.CAUSES, strict=True)))
def test_each_cause_of_a_jump_leaves_its_own_marks(ranks, run, cause):
    results = ranks(4, jobs.train_until_it_jumps, data.Run(run), jobs.replay).results
    _, norms, exact, disagree = zip(*(rank[5] for rank in results), strict=True)
    longest = max(norms)
    is_real = bool(exact[norms.index(longest)] > 0.9 * longest)  # in float64 too
    assert is_real is (cause in ("rate", "batch"))
    assert all(norm > 3 for norm in norms) is (cause == "rate")
    assert disagree == ([1, 2] if cause == "gpu" else [],) * 4


def ask(tmp_path, world_size, *job):
    """What a picture says of a job that the debug server has been asked about."""
    with pytest.raises(RankFailed):
        launch(server.ask_server, world_size, str(tmp_path), figures.free_ports(), *job)
    return figures.calls_picture(str(tmp_path)).text.splitlines()


@pytest.mark.slow
def test_the_debug_server_tells_who_has_made_fewer_calls_and_leaves_nothing(tmp_path):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    zero, one, _ = ask(tmp_path, 3, jobs.average_labelled, data.labels_of)
    assert zero.endswith("all_reduce · all_reduce · all_reduce · all_reduce waits")
    assert one == "rank 1, has returned: all_reduce · all_reduce · all_reduce"
    time.sleep(0.5)
    after = psutil.Process().children(recursive=True)
    listening = [c for p in after for c in p.net_connections() if c.status == "LISTEN"]
    assert not [p for p in after if p.pid not in before and listening]


@pytest.mark.slow
def test_a_rank_that_called_another_s_group_has_no_call(tmp_path):
    said = ask(tmp_path, 4, jobs.average_in_pairs)
    assert said[2].endswith("no call") and said[3].endswith("group 2 waits")


@pytest.mark.parametrize("way, steps", [("alone", {0, 1, 4, 5}), ("together", {0, 4})])
def test_ranks_that_collect_together_pause_half_as_often(ranks, way, steps):
    found = ranks(2, jobs.pause_for_garbage, way).results
    assert {step for rank in found for step in rank} == steps
    assert gc.isenabled()
