"""When the five wrappers communicate, and what that costs."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets import experiments, measurements, wrappers
from mgpu_tutorial.ddp_buckets.experiments import Setting, Tower
from mgpu_tutorial.ddp_buckets.wrappers import WRAPPERS
from mgpu_tutorial.lab import launch, timeline
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.shared.cost_model import Link
from tests.ddp_buckets import ranks as workers

PARAMETERS, WEIGHTS = 14, 6
EXPECTED = {  # calls, how many of them begin during backward
    wrappers.NaiveDDP: (PARAMETERS, 0),
    wrappers.FlatDDP: (1, 0),
    wrappers.OverlappedDDP: (PARAMETERS, PARAMETERS),
    wrappers.BucketedDDP: (WEIGHTS, WEIGHTS),
    DistributedDataParallel: (WEIGHTS, WEIGHTS),
}


@pytest.fixture(scope="module")
def reports():
    """Three steps with each wrapper; a bucket holds the MiB of one weight."""
    setting = Setting(width=128, batch=4, bucket_cap_mb=1 / 16)
    return {
        wrapper: launch(measurements.record_steps, 2, wrapper, setting, trace=True)
        for wrapper in WRAPPERS
    }


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_each_wrapper_makes_its_calls_at_its_time(reports, wrapper):
    size = sum(p.nbytes for p in Tower(128, 6).parameters())
    for step in ("step 1", "step 2"):
        counted = measurements.count_calls(reports[wrapper], step)
        assert counted == (*EXPECTED[wrapper], size)
        events = events_of(reports[wrapper], step)
        assert {e.op for e in events if e.kind == "collective"} == {"all_reduce"}


def test_the_first_backward_uses_one_bucket(reports):
    report = reports[wrappers.BucketedDDP]
    assert measurements.count_calls(report, "step 0").count == 1


@pytest.mark.parametrize("wrapper", WRAPPERS[2:])
def test_what_is_sent_is_drawn_until_it_is_complete(reports, wrapper):
    events = events_of(reports[wrapper], "step 2")
    sent = [e for e in events if e.op == "all_reduce"]
    assert sent and all(e.end < e.done for e in sent)
    ends = {e.rank: e.end for e in reports[wrapper].events if e.note == "step 2"}
    assert all(e.done <= ends[e.rank] for e in sent)
    assert not [e for e in events if e.kind == "wait"]
    text = repr(timeline(reports[wrapper], during="step 2"))
    assert text.startswith(f"timeline of 2 ranks, {6 + len(sent)} intervals: forward,")


def test_the_two_steps_of_the_start_do_not_count():
    for times in launch(workers.time_on_a_clock_of_our_own, 2).results:
        assert times == {"SlowAtFirst": [3, 4, 5]}


def test_the_shortest_step_is_that_of_the_slower_rank():
    def span(rank, index, step, begin, end):
        return Event(rank, index, "span", begin, end, note=f"step {step}")

    ends = [(0.1, 0.1), (1.1, 1.1), (2.9, 2.2), (3.4, 3.6), (4.5, 4.5)]
    steps = enumerate(ends)
    spans = [span(r, i, i, float(i), both[r]) for i, both in steps for r in (0, 1)]
    inside = Event(0, 9, "all_reduce", 4.1, 4.2, nbytes=8)
    found = measurements.shortest_step(Report(2, events=[*spans, inside]))
    assert measurements.milliseconds(found, "shortest") == pytest.approx(500)
    assert measurements.count_calls(found, "shortest") == (1, 0, 8)
    notes = [event.note for event in found.events]
    assert notes.count("shortest") == 2 and "step 4" not in notes and "step 3" in notes


def test_rows_of_letters_have_a_block_for_each_break():
    ranks = [{"nothing": ["x", "y"], "start": ["x", "z"]}, {"nothing": ["x", "y"]}]
    ranks[1]["start"] = ["q", "z"]
    assert measurements.rows_of_letters(ranks) == [
        ["nothing", "rank 0", "A", "B"],
        ["", "rank 1", "A", "B"],
        ["start", "rank 0", "A", "C"],
        ["", "rank 1", "B", "C"],
    ]


def test_the_distance_is_that_of_the_farthest_rank_gradient_or_parameter():
    def trained(gradient, parameter):
        return [torch.tensor([0.0, gradient])], [torch.tensor([parameter])]

    alone = trained(1.0, 2.0)
    both = [trained(1.0, 2.0), trained(1.0, 2.5)]
    assert measurements.distance(both, alone) == 0.5
    assert measurements.distance([trained(-1.0, 2.0), alone], alone) == 2.0


def test_a_link_takes_a_ring_of_messages(monkeypatch):
    seconds = []
    monkeypatch.setattr(experiments, "slow_link", seconds.append)
    Setting(link=Link(latency=0.5, bandwidth=100.0)).network(4)
    # 2 (N - 1) messages, each of a quarter of the bytes
    assert seconds[0](800) == 6 * (0.5 + 200 / 100.0)


@pytest.mark.timing
def test_over_a_slow_link_each_wrapper_ends_before_the_one_before():
    slow = Setting(256, 6, 8, bucket_cap_mb=0.25, pause=20e-3, link=Link(2.5e-3, 20e6))
    times = launch(measurements.time_steps, 2, WRAPPERS, slow).results[0]
    best = {name: min(seconds) for name, seconds in times.items()}
    # 120 ms of backward, calls of 5 ms, and 79 ms for the bytes of all six layers
    assert best["NaiveDDP"] > 0.120 + 14 * 0.005 + 0.079
    assert best["NaiveDDP"] > best["FlatDDP"] > 0.120 + 0.005 + 0.079
    # from the first layer on the link is busy: twelve calls, and all the bytes
    assert best["FlatDDP"] > best["OverlappedDDP"] > 0.020 + 12 * 0.005 + 0.078
    # all but the last bucket are through when backward ends
    for name in ("BucketedDDP", "DistributedDataParallel"):
        assert best["OverlappedDDP"] > best[name] > 0.120 + 0.005 + 0.013


@pytest.mark.timing
def test_a_middle_bucket_size_is_the_fastest_on_a_network_that_we_set():
    slow = Setting(256, 16, 4, pause=6e-3, link=Link(5e-3, 50e6))
    caps = [0.25, 1.0, 4.0]
    times = launch(measurements.time_bucket_caps, 2, caps, slow).results[0]
    # 16 buckets' latency; four buckets behind a quarter of backward; all at the end.
    assert min(times, key=times.get) == 1.0
    assert times[0.25] > 16 * 0.010 + 0.0843 and times[4.0] > 0.096 + 0.010 + 0.0843
