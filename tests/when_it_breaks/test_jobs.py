"""Each job has the symptom that the chapter shows, and the tools name the fault."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial.lab import RankFailed, RanksHung
from mgpu_tutorial.when_it_breaks import data, figures, jobs, record

FILE = Path(jobs.__file__)


def line_of(job):
    """The rank and the text of the line that are given as the fault of a job."""
    rank, number = figures.fault_of(job)
    return rank, FILE.read_text(encoding="utf-8").splitlines()[number - 1].strip()


def analysis(ranks, folder, capsys, job, world_size):
    """Runs a job with a limit; what each rank said first, and what the analyser says."""
    how = {"limit": 2.0, "backend": "none"}
    report = ranks(world_size, record.run_with_limit, job, str(folder), **how)
    figures.print_first_lines(report)
    said = [line.split(": ", 1)[1] for line in capsys.readouterr().out.splitlines()]
    return said, figures.analyse(str(folder))


def test_a_rank_that_skips_a_batch_is_missing_in_the_last_call(ranks, tmp_path, capsys):
    said, records = analysis(ranks, tmp_path, capsys, jobs.average_labelled, 3)
    waited = "Timed out waiting 2000ms"
    assert said == [waited, "has ended", waited]
    assert "Not all ranks joining collective, sequence number: 4" in records
    assert "missing ranks: {1}" in records
    text = FILE.read_text(encoding="utf-8")
    call = text.splitlines().index("        dist.all_reduce(gradient, op=dist.ReduceOp.AVG)")
    assert f"jobs.py:{call + 1}" in records
    assert line_of(jobs.average_labelled) == (1, "continue")
    empty = [[bool((b < 0).all()) for b in data.labels_of(rank)] for rank in range(3)]
    assert empty == [[False] * 4, [False, False, True, False], [False] * 4]


def test_a_histogram_of_another_length_leaves_one_rank_waiting(ranks, monkeypatch):
    with pytest.raises(RankFailed, match="ranks 0 and 2 returned while rank 1 still waited"):
        ranks(3, jobs.count_classes)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    with pytest.raises(RankFailed, match="rank 1 raised .* shapes: 4vs 3, at jobs.py"):
        ranks(3, jobs.count_classes)
    fault = "counts = torch.bincount(classes[rank::world_size])"
    assert line_of(jobs.count_classes) == (1, fault)


def test_two_calls_in_another_order_stand_still_at_two_lines(ranks):
    with pytest.raises(RanksHung) as hung:
        ranks(3, jobs.agree_on_settings, timeout=2)
    lines = str(hung.value).splitlines()
    rank, number = figures.fault_of(jobs.agree_on_settings)
    assert rank == 0
    assert lines[1].endswith(f"jobs.py:{number}  dist.all_reduce(samples)")
    assert all("dist.broadcast(learning_rate, src=0)" in line for line in lines[2:4])


def test_a_rank_with_the_wrong_group_is_missing_in_the_right_one(ranks, tmp_path, capsys):
    job = partial(jobs.average_in_pairs, limit=2.0)
    said, records = analysis(ranks, tmp_path, capsys, job, 4)
    assert said == [
        "[Rank 0]: Ranks 3 failed to pass monitoredBarrier in 2000 ms",
        "Rank 1 successfully reached monitoredBarrier",
        "Rank 2 successfully reached monitoredBarrier",
        "Connection closed by peer",
    ]
    assert "missing ranks: {2}" in records and "expected ranks: {2, 3}" in records
    rank, line = line_of(jobs.average_in_pairs)
    assert rank == 2 and line.endswith("group=pairs[rank // 3])")


def test_a_file_that_shrinks_kills_the_rank_that_reads_its_end(ranks):
    with pytest.raises(RankFailed) as failed:
        ranks(2, jobs.average_file)
    assert str(failed.value).startswith("rank 1 was killed by SIGBUS, at jobs.py:")
    assert "mean = numbers.chunk(world_size)[rank].mean()" in str(failed.value)
    assert line_of(jobs.average_file) == (0, "torch.ones(2**17).numpy().tofile(path)")


def test_the_rank_with_the_longest_sequence_waits_least(ranks):
    run = ranks(4, jobs.train_on_sequences, trace=True)
    waited = figures.seconds_in(run, "all_reduce")
    rank, line = line_of(jobs.train_on_sequences)
    assert rank == 3 == waited.index(min(waited))
    assert line.startswith("mine = sorted(lengths)")
    # a sleep is never shorter than it was asked to be
    assert figures.seconds_in(run, "span")[3] > 3 * 5e-5 * (66**2 + 70**2) - 0.01


def test_one_gradient_that_is_no_number_reaches_all_ranks_behind_finite_losses(ranks):
    results = ranks(3, jobs.spread_points).results
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
    for loss, seen in zip(losses, ranks(3, jobs.spread_points).results, strict=True):
        assert seen[0] == pytest.approx([loss.item(), expected])


def test_anomaly_detection_names_the_rank_and_the_line_of_forward(ranks):
    with pytest.raises(RankFailed) as failed:
        ranks(3, jobs.spread_points, detect=True)
    assert str(failed.value).startswith("rank 2 raised RuntimeError: Function 'PowBackward0'")
    rank, line = line_of(jobs.spread_points)
    assert rank == 2 and line in failed.value.report.stderr[2]
    _, number = figures.fault_of(jobs.spread_points)
    assert figures.own_places(failed.value.report.stderr[2])[-1] == f"jobs.py:{number}"


@pytest.mark.parametrize("per_rank", [False, True])
def test_one_seed_for_all_deals_well_and_another_for_each_draws_other_noise(ranks, per_rank):
    drawn = ranks(3, jobs.draw_epoch, per_rank).results
    dealt = sum((mine for _, mine, _ in drawn), [])
    assert len(dealt) == 12 and (sorted(dealt) == list(range(12))) is not per_rank
    for draws in ([order for order, _, _ in drawn], [noise for _, _, noise in drawn]):
        assert len({tuple(draw) for draw in draws}) == (3 if per_rank else 1)
    assert figures.drawn_alike() == "order"  # or no sample has one rank


def test_a_rank_waits_for_the_records_of_all_or_until_its_time_is_up(tmp_path, monkeypatch):
    slept = []

    def sleep(seconds):
        (tmp_path / f"rank_{len(slept)}").touch()
        slept.append(seconds)

    monkeypatch.setattr(record.time, "sleep", sleep)
    record.wait_for_records(3, str(tmp_path), seconds=0)
    assert slept == []
    record.wait_for_records(3, str(tmp_path), seconds=60)
    assert len(slept) == 3


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


def test_the_same_order_mends_the_job_and_asynchronous_calls_do_not(ranks):
    assert figures.order_remedy() == "b"
    assert ranks(3, in_the_same_order, "b").results == [(303.0, 0.1)] * 3
    with pytest.raises((RanksHung, RankFailed)):
        ranks(3, in_the_same_order, "c", timeout=2)


def join_on(rank, world_size, folder, interface):
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)


def test_gloo_says_which_interface_it_did_not_find(ranks, tmp_path):
    with pytest.raises(RankFailed, match="Unable to find address for: eth7"):
        ranks(2, join_on, str(tmp_path), "eth7", backend="none")
