"""What the chapter says of its jobs and does not show."""

import inspect

import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial.lab import RankFailed, RanksHung
from mgpu_tutorial.when_it_breaks import data, figures, jobs


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
    assert disagree == ([1, 2] if cause == "card" else [],) * 4
