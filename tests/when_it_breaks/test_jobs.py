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


def test_a_file_that_shrinks_kills_the_rank_that_reads_its_end(ranks):
    with pytest.raises(RankFailed) as failed:
        ranks(2, jobs.average_file)
    assert str(failed.value).startswith("rank 1 was killed by SIGBUS, at jobs.py:")
    assert "mean = numbers.chunk(world_size)[rank].mean()" in str(failed.value)


def test_the_rank_with_the_longest_sequence_waits_least(ranks):
    events = ranks(4, jobs.train_on_sequences, trace=True).events
    waited, computed = (
        [sum(e.end - e.begin for e in events if (e.op, e.rank) == (op, r)) for r in range(4)]
        for op in ("all_reduce", "span")
    )
    assert waited.index(min(waited)) == 3
    # a sleep is never shorter than it was asked to be
    assert computed[3] > 3 * 2e-5 * (66**2 + 70**2) - 0.01


def test_one_gradient_that_is_no_number_reaches_all_ranks_behind_finite_losses(ranks):
    results = ranks(3, jobs.spread_points, data.points_of).results
    losses = torch.tensor([[loss for loss, _ in seen] for seen in results])
    weights = torch.tensor([[weight for _, weight in seen] for seen in results])
    assert losses[:, :2].isfinite().all() and losses[:, 2].isnan().all()
    assert weights[:, 0].isfinite().all() and weights[:, 1:].isnan().all()


def test_the_first_step_is_that_of_one_process(ranks):
    weight = torch.ones(2, requires_grad=True)
    losses = []
    for rank in range(3):
        gaps = ((data.points_of(rank, 0) * weight).diff(dim=0) ** 2).sum(1).sqrt()
        losses.append(((gaps - 1) ** 2).mean())
    (gradient,) = torch.autograd.grad(sum(losses) / 3, weight)
    expected = (weight - 0.01 * gradient)[0].item()
    results = ranks(3, jobs.spread_points, data.points_of).results
    for loss, seen in zip(losses, results, strict=True):
        assert seen[0] == pytest.approx([loss.item(), expected], abs=0.006)


def in_the_same_order(rank, world_size, how):
    """The job in another way: "b" the same order, "c" all calls first and then the waits."""
    samples = torch.tensor([100.0 + rank])
    rate = torch.tensor([0.1 if rank == 0 else 0.0])

    def add():
        return dist.all_reduce(samples, async_op=how == "c")

    def tell():
        return dist.broadcast(rate, src=0, async_op=how == "c")

    calls = [add, tell] if rank == 0 or how == "b" else [tell, add]
    for work in [call() for call in calls]:
        if work:
            work.wait()
    return samples.item(), round(rate.item(), 3)


@pytest.mark.slow
def test_the_same_order_mends_the_job_and_asynchronous_calls_do_not(ranks):
    assert figures.REMEDY == "b"
    assert ranks(3, in_the_same_order, "b").results == [(303.0, 0.1)] * 3
    with pytest.raises((RanksHung, RankFailed)):
        ranks(3, in_the_same_order, "c", timeout=2)
