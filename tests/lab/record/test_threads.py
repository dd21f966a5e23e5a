"""The spans of threads go to tracks of their own, and only while somebody records."""

import threading
import time

import pytest

from mgpu_tutorial.lab import launch, record_threads, span, timeline
from tests.lab import ranks


def in_threads(names):
    def run():
        with span("inside"):
            time.sleep(0.01)

    threads = [threading.Thread(target=run, name=name) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_every_thread_has_a_track_and_the_main_one_is_first():
    with record_threads() as report, span("all of it"):
        in_threads(["virtual:1", "cuda:0"])
    assert report.tracks == ["main", "cuda:0", "virtual:1"] and report.world_size == 3
    spans = [(report.track(e.rank), e.note) for e in report.events]
    assert sorted(spans) == [
        ("cuda:0", "inside"),
        ("main", "all of it"),
        ("virtual:1", "inside"),
    ]
    whole = report.events[0]
    assert all(whole.begin <= e.begin < e.end <= whole.end for e in report.events)
    assert whole.begin >= 0 and whole.end <= report.seconds
    plot = timeline(report)
    assert plot.png.startswith(b"\x89PNG")
    assert repr(plot) == "timeline of 3 threads, 3 intervals: all of it, inside"


def test_nothing_is_recorded_before_and_after():
    with record_threads() as report:
        pass
    in_threads(["late"])
    assert report.events == [] and report.tracks == []
    with pytest.raises(ValueError, match="nothing was recorded"):
        timeline(report)


def test_a_failing_block_stops_the_recording_too():
    with pytest.raises(ZeroDivisionError), record_threads():
        raise ZeroDivisionError
    with record_threads() as report:
        in_threads(["virtual:0"])
    assert report.tracks == ["virtual:0"]


def test_a_block_inside_a_block_is_refused():
    with (
        record_threads(),
        pytest.raises(RuntimeError, match="recorded already"),
        record_threads(),
    ):
        pass


def test_ranks_keep_their_own_names_and_records():
    with record_threads() as report:
        other = launch(ranks.silent, 2, trace=True)
    assert report.events == [] and other.track(1) == "rank 1"
