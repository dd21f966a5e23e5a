"""What the chapter says of its jobs and does not show."""

import inspect

import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial.lab import RankFailed, RanksHung
from mgpu_tutorial.when_it_breaks import data, figures, jobs


@pytest.mark.parametrize(
    "job, rank, line",
    [
        (jobs.average_labelled, 1, "continue"),
        (jobs.count_classes, 1, "counts = torch.bincount(classes[rank::world_size])"),
        (jobs.agree_on_settings, 0, "dist.all_reduce(samples)"),
        (jobs.average_file, 0, "torch.ones(2**17).numpy().tofile(path)"),
    ],
)
def test_a_fault_is_a_rank_and_a_line_of_the_file(job, rank, line):
    who, number = figures.fault_of(job)
    text = inspect.getsource(jobs).splitlines()
    assert (who, text[number - 1].strip()) == (rank, line)


def test_commands_run_on_the_cpu_and_loopback_whatever_the_user_has_set(monkeypatch):
    monkeypatch.setattr(figures.subprocess, "run", lambda *_, env, **__: env)
    ours = {"CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": figures.LOOPBACK}
    for name in ours:
        monkeypatch.setenv(name, "theirs")
    found = figures.shell("torchrun job.py", TORCH_FR_BUFFER_SIZE="7")
    assert found.items() >= (ours | {"TORCH_FR_BUFFER_SIZE": "7"}).items()


def test_the_rank_with_the_longest_sequence_waits_least(ranks):
    events = ranks(4, jobs.train_on_sequences, trace=True).events
    waited, computed = (
        [sum(e.end - e.begin for e in events if (e.op, e.rank) == (op, r)) for r in range(4)]
        for op in ("all_reduce", "span")
    )
    assert waited.index(min(waited)) == 3
    # a sleep is never shorter than it was asked to be
    assert computed[3] > 3 * 2e-5 * (66**2 + 70**2) - 0.01


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


TRAIN = jobs.train_until_it_jumps
LONG = {"A": [2], "B": [0, 1, 2, 3], "C": [1], "D": [1]}


@pytest.mark.slow
@pytest.mark.parametrize("run", "ABCD")
def test_each_cause_of_a_jump_leaves_its_own_marks(ranks, run):
    results = ranks(4, TRAIN, data.Run(run), jobs.replay).results
    usual = ranks(4, TRAIN, data.Run("none"), jobs.replay).results
    mean = [sum(rank[step][0] for rank in results) / 4 for step in range(7)]
    assert max(mean[5:]) > 3 * max(mean[:5]) and torch.tensor(mean).isfinite().all()
    norms, expected = ([rank[5][1] for rank in each] for each in (results, usual))
    assert [r for r in range(4) if norms[r] > 3 * expected[r]] == LONG[run]
    _, norm, exact, disagree = results[norms.index(max(norms))][5]
    cause = figures.CAUSES["ABCD".index(run)]
    assert bool(exact > 0.9 * norm) is (cause in ("rate", "batch"))
    assert disagree == ([1, 2] if cause == "card" else [])
    assert all(step[3] == [] for rank in results for step in rank[:5])
