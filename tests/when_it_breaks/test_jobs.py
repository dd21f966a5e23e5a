"""Each job has the symptom that the chapter shows, and the tools name the fault."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch

from mgpu_tutorial.lab import RankFailed, RanksHung, launch
from mgpu_tutorial.when_it_breaks import data, jobs, measurements, record

FILE = Path(jobs.__file__)


def line_of(job):
    """The text of the line that is given as the fault of a job."""
    rank, number = measurements.fault_of(job)
    return rank, FILE.read_text(encoding="utf-8").splitlines()[number - 1].strip()


@pytest.fixture
def analysis(tmp_path, monkeypatch):
    """Runs a job with a limit; what each rank said first, and what the analyser says."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")

    def run(job, world_size):
        worker = record.run_with_limit
        report = launch(worker, world_size, job, str(tmp_path), limit=2.0, backend="none")
        return measurements.first_lines(report), measurements.analyse(str(tmp_path))

    return run


def test_a_rank_that_skips_a_batch_is_missing_in_the_last_call(analysis):
    said, found = analysis(jobs.average_labelled, 3)
    assert said == ["Timed out waiting 2000ms", "has ended", "Timed out waiting 2000ms"]
    assert "Not all ranks joining collective, sequence number: 4" in found
    assert "missing ranks: {1}" in found
    text = FILE.read_text(encoding="utf-8")
    call = text.splitlines().index("        dist.all_reduce(gradient, op=AVG)")
    assert f"jobs.py:{call + 1}" in found
    assert line_of(jobs.average_labelled) == (1, "continue")


def test_only_rank_1_has_a_batch_without_labels():
    empty = [[bool((b < 0).all()) for b in data.labels_of(rank)] for rank in range(3)]
    assert empty == [[False] * 4, [False, False, True, False], [False] * 4]


def test_a_histogram_of_another_length_leaves_one_rank_waiting(monkeypatch):
    with pytest.raises(RankFailed, match="ranks 0 and 2 returned while rank 1 still waited"):
        launch(jobs.count_classes, 3)
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    with pytest.raises(RankFailed, match="rank 1 raised .* shapes: 4vs 3, at jobs.py"):
        launch(jobs.count_classes, 3)
    assert line_of(jobs.count_classes) == (1, "counts = torch.bincount(mine)")


def test_the_last_class_lies_with_rank_1_only():
    assert torch.bincount(data.classes()).tolist() == [3, 3, 2, 4]
    assert [len(torch.bincount(data.classes()[r::3])) for r in range(3)] == [3, 4, 3]


def test_two_calls_in_another_order_stand_still_at_two_lines():
    with pytest.raises(RanksHung) as hung:
        launch(jobs.agree_on_settings, 3, timeout=2)
    lines = str(hung.value).splitlines()
    rank, number = measurements.fault_of(jobs.agree_on_settings)
    assert rank == 0
    assert lines[1].endswith(f"jobs.py:{number}  dist.all_reduce(samples)")
    assert all("dist.broadcast(learning_rate, src=0)" in line for line in lines[2:4])


def test_a_rank_with_the_wrong_group_is_missing_in_the_right_one(analysis):
    said, found = analysis(partial(jobs.average_in_pairs, limit=2.0), 4)
    assert said[0] == "[Rank 0]: Ranks 3 failed to pass monitoredBarrier in 2000 ms"
    assert "missing ranks: {2}" in found and "expected ranks: {2, 3}" in found
    rank, line = line_of(jobs.average_in_pairs)
    assert rank == 2 and line.endswith("group=pairs[rank // 3])")


def test_a_file_that_shrinks_kills_the_rank_that_reads_its_end():
    with pytest.raises(RankFailed) as failed:
        launch(jobs.average_file, 2)
    assert str(failed.value).startswith("rank 1 was killed by SIGBUS, at jobs.py:")
    assert "mean = numbers.chunk(world_size)[rank].mean()" in str(failed.value)
    assert line_of(jobs.average_file) == (0, "torch.ones(2**17).numpy().tofile(path)")


def test_the_rank_with_the_longest_sequence_waits_least():
    run = launch(jobs.train_on_sequences, 4, trace=True)
    waited = measurements.seconds_in(run, "all_reduce")
    rank, line = line_of(jobs.train_on_sequences)
    assert rank == 3 == waited.index(min(waited))
    assert line.startswith("lengths = sorted(LENGTHS)")
    # a sleep is never shorter than it was asked to be
    assert measurements.seconds_in(run, "span")[3] > 3 * 5e-5 * (66**2 + 70**2) - 0.01


def test_one_gradient_that_is_no_number_reaches_all_ranks_behind_finite_losses():
    results = launch(jobs.spread_points, 3).results
    losses = torch.tensor([[loss for loss, _ in seen] for seen in results])
    weights = torch.tensor([[weight for _, weight in seen] for seen in results])
    assert losses[:, :2].isfinite().all() and losses[:, 2].isnan().all()
    assert weights[:, 0].isfinite().all() and weights[:, 1:].isnan().all()


def test_anomaly_detection_names_the_rank_and_the_line_of_forward():
    with pytest.raises(RankFailed) as failed:
        launch(jobs.spread_points, 3, detect=True)
    assert str(failed.value).startswith("rank 2 raised RuntimeError: Function 'PowBackward0'")
    rank, line = line_of(jobs.spread_points)
    assert rank == 2 and line in failed.value.report.stderr[2]


def test_one_seed_for_all_deals_well_and_draws_the_same_noise():
    drawn = launch(jobs.draw_epoch, 3, per_rank=False).results
    assert sorted(sum((d.mine for d in drawn), [])) == list(range(12))
    assert drawn[0].noise == drawn[1].noise == drawn[2].noise
    assert drawn[0].order == drawn[1].order == drawn[2].order
    assert measurements.drawn_alike() == "order"  # or no sample has one rank


def test_a_seed_for_each_rank_draws_other_noise_and_loses_samples():
    drawn = launch(jobs.draw_epoch, 3, per_rank=True).results
    assert len({tuple(d.noise) for d in drawn}) == 3
    assert len(set(sum((d.mine for d in drawn), []))) < 12
    assert not math.isnan(sum(drawn[0].noise))
