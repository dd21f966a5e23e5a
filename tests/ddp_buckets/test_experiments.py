"""When the five ways communicate, what they cost, and why the ranks agree."""

import pytest
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets import experiments, wrappers
from mgpu_tutorial.lab import launch, timeline
from mgpu_tutorial.lab.draw.timeline import events_of

PARAMETERS, WEIGHTS = 14, 6
EXPECTED = {  # calls, how many of them begin during backward
    wrappers.NaiveDDP: (PARAMETERS, 0),
    wrappers.FlatDDP: (1, 0),
    wrappers.OverlappedDDP: (PARAMETERS, PARAMETERS),
    wrappers.BucketedDDP: (WEIGHTS, WEIGHTS),
    DistributedDataParallel: (WEIGHTS, WEIGHTS),
}


@pytest.mark.parametrize("way", experiments.WAYS, ids=lambda way: way.__name__)
def test_each_way_makes_its_calls_at_its_time(way):
    report = launch(experiments.recorded, 2, way, width=128, trace=True, bucket_cap_mb=1 / 16)
    size = sum(p.nbytes for p in experiments.Tower(128, 6).parameters())
    calls, early = EXPECTED[way]
    for step in ("step 1", "step 2"):
        counted = experiments.calls(report, step)
        assert counted == {"calls": calls, "during backward": early, "bytes": size}


def test_the_first_backward_uses_one_bucket():
    report = launch(experiments.recorded, 2, wrappers.BucketedDDP, width=128, trace=True)
    assert experiments.calls(report, "step 0")["calls"] == 1


@pytest.mark.parametrize("way", experiments.WAYS[2:], ids=lambda way: way.__name__)
def test_what_is_sent_is_drawn_until_it_is_complete(way):
    report = launch(experiments.recorded, 2, way, width=128, trace=True)
    sent = [e for e in events_of(report, "step 2") if e.op == "all_reduce"]
    assert sent and all(e.end < e.done for e in sent)
    ends = {e.rank: e.end for e in report.events if e.note == "step 2"}
    assert all(e.done <= ends[e.rank] for e in sent)
    assert not [e for e in events_of(report, "step 2") if e.kind == "wait"]
    text = repr(timeline(report, during="step 2"))
    assert text.startswith(f"timeline of 2 ranks, {6 + len(sent)} intervals: forward,")


def test_over_a_slow_network_buckets_beat_both_extremes():
    setting = {"width": 128, "depth": 8, "batch": 4, "bucket_cap_mb": 1 / 8}
    setting |= {"pause": 5e-3, "link": (2e-3, 50e6)}
    times = launch(experiments.step_times, 2, experiments.WAYS, **setting).results[0]
    best = {name: min(seconds) for name, seconds in times.items()}
    # 18 calls of 4 ms and 10.6 ms of bytes behind 40 ms of backward.
    assert best["NaiveDDP"] > 0.040 + 18 * 0.004 + 0.0106
    assert best["FlatDDP"] > 0.040 + 0.004 + 0.0106
    assert max(best["BucketedDDP"], best["DistributedDataParallel"]) < best["NaiveDDP"]
    assert best["BucketedDDP"] < best["OverlappedDDP"] < best["NaiveDDP"]


@pytest.mark.parametrize("way", [*experiments.WAYS[:4], DistributedDataParallel])
@pytest.mark.parametrize("world_size", [2, 3])
def test_replicas_agree_until_one_of_three_things_is_broken(way, world_size):
    broken = {
        what: {"way": way, "broken": what} for what in ("", "start", "gradient", "step")
    }
    runs = launch(experiments.each, world_size, experiments.fingerprints, broken).results
    letters = {what: experiments.letters([run[what] for run in runs]) for what in broken}
    assert letters[""] == [["A", "B", "C", "D", "E"]] * world_size
    parts = {
        what: [len(set(column)) for column in zip(*rows, strict=True)]
        for what, rows in letters.items()
    }
    assert parts["start"] == [2] * 5  # rank 1 against all others, for ever
    assert parts["gradient"] == parts["step"] == [1] + [world_size] * 4


def test_letters_follow_the_order_of_appearance():
    assert experiments.letters([["x", "z"], ["y", "z"]]) == [["A", "C"], ["B", "C"]]


def test_shares_of_all_ranks_are_the_whole_batch():
    (whole,) = experiments.shares(0, 1, 1, 8)
    parts = [experiments.shares(rank, 3, 1, 8)[0] for rank in range(3)]
    assert [len(part) for part in parts] == [8, 8, 8]
    assert whole.tolist() == sum((part.tolist() for part in parts), [])
