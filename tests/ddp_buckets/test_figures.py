"""What is counted, computed and timed, and what the exercises take."""

from dataclasses import replace

import pytest
import torch

from mgpu_tutorial.ddp_buckets import figures
from mgpu_tutorial.ddp_buckets.experiments import Setting, train_replicas
from mgpu_tutorial.ddp_buckets.wrappers import WRAPPERS, BucketedDDP
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.lab.record.trace import Event
from mgpu_tutorial.shared.cost_model.links import Link
from tests.test_exercises import try_answers


@pytest.mark.parametrize("begin, early", [(1.5, 0), (3, 1), (3.9, 1), (4.5, 0), (None, 0)])
def test_a_call_is_early_only_while_backward_runs(begin, early):
    """The span of backward is from 2 to 4, the step from 1 to 5."""
    events = [
        Event(0, 0, "span", 1.0, 5.0, note="step 2"),
        Event(0, 1, "span", 2.0, 4.0, note="backward"),
        Event(1, 0, "span", 1.0, 5.0, note="step 2"),
        Event(1, 1, "span", 2.0, 4.0, note="backward"),
        Event(1, 2, "all_reduce", 3.0, 3.1, nbytes=100),  # of another rank
        Event(0, 2, "barrier", 3.0, 3.1),
        Event(0, 9, "all_reduce", 6.0, 6.1, nbytes=100),  # of another step
    ]
    if begin:
        events += [Event(0, 3, "all_reduce", begin, begin + 0.1, nbytes=8)]
        events += [Event(0, 4, "all_reduce", 4.5, 4.6, nbytes=4)]
    calls = figures.count_calls(Report(2, events=events))
    assert calls == ((2, early, 12) if begin else (0, 0, 0))


def test_the_model_computes_when_each_wrapper_ends():
    """Three layers of 4 s, 80 bytes each, and a head of 40 + 40; a byte takes 0.05 s."""
    link = Link(latency=0.5, bandwidth=20.0)  # two ranks: a second a call, and S / 20
    setting = Setting(width=1, depth=3, pause=4.0, link=link)
    layer, head = [4, 4], [40, 40]
    naive = 12 + 8 + (3 * sum(layer) + sum(head)) / 20
    flat = 12 + 1 + (3 * sum(layer) + sum(head)) / 20
    # the head's two calls are over at 6, after the last layer; the others keep up
    overlapped = 12 + 2 + sum(layer) / 20
    bucketed = 12 + 1 + sum(layer) / 20
    expected = [1e3 * end for end in (naive, flat, overlapped, bucketed, bucketed)]
    assert figures.computed_milliseconds(setting) == pytest.approx(expected)
    # a link that does not keep up is busy from the first call on
    slow = figures.computed_milliseconds(replace(setting, link=Link(2.5, 20.0)))
    assert slow[2] == pytest.approx(1e3 * (8 * 5 + 5.2))


def test_steps_are_timed_in_turns_after_two_that_do_not_count(ranks):
    setting = Setting(width=8, depth=1, batch=2, bucket_cap_mb=25, link=Link(0.02, 1e9))
    report = ranks(2, figures.time_steps, WRAPPERS, setting, steps=3, trace=True)
    names = [wrapper.__name__ for wrapper in WRAPPERS]
    for times in report.results:
        assert [len(times[name]) for name in names] == [3] * 5
        assert min(times["NaiveDDP"]) >= 4 * 2 * 0.02  # a call for each parameter
        assert min(times["FlatDDP"]) >= 2 * 0.02
    sent = [e for e in report.events if e.op == "all_reduce" and e.rank == 0]
    assert len(sent) == (2 + 3) * (4 + 1 + 4 + 1 + 1)


@pytest.mark.slow
@pytest.mark.timing
def test_over_a_slow_link_each_wrapper_ends_when_the_model_says(ranks):
    slow = Setting(256, 6, 8, bucket_cap_mb=0.25, pause=20e-3, link=Link(2.5e-3, 20e6))
    times = ranks(2, figures.time_steps, WRAPPERS, slow).results[0]
    least = [1e3 * min(seconds) for seconds in times.values()]
    computed = figures.computed_milliseconds(slow)
    assert [round(end) for end in computed] == [269, 204, 159, 138, 138]
    for name, found, expected in zip(times, least, computed, strict=True):
        assert expected < found < 1.5 * expected, name
    assert least[0] > least[1] > least[2] > max(least[3:])


@pytest.mark.slow
@pytest.mark.timing
def test_a_middle_bucket_size_is_the_fastest_on_a_network_that_we_set(ranks):
    slow = Setting(256, 16, 4, pause=6e-3, link=Link(5e-3, 50e6))
    times = ranks(2, figures.time_bucket_caps, [0.25, 1.0, 4.0], slow).results[0]
    # 16 buckets' latency; four buckets behind a quarter of backward; all at the end.
    assert min(times, key=times.get) == 1.0
    assert times[0.25] > 16 * 0.010 + 0.0843 and times[4.0] > 0.096 + 0.010 + 0.0843


# The exercises


@pytest.mark.parametrize("wrapper", [*WRAPPERS, figures.PlantedDDP])
def test_the_planted_bug_shows_with_a_tied_weight(ranks, wrapper):
    right = wrapper is not figures.PlantedDDP
    assert ranks(2, figures.average_tied_gradients, wrapper).results == [right] * 2


def test_the_planted_bug_shows_nowhere_else(ranks):
    planted, right = (
        ranks(2, train_replicas, wrapper, steps=3).results
        for wrapper in (figures.PlantedDDP, BucketedDDP)
    )
    torch.testing.assert_close(planted, right)


@pytest.mark.slow
@pytest.mark.timing
def test_the_first_exercise_takes_the_fastest_bucket_size(capsys):
    wrong = {
        "bucket_cap_mb = 0.25": "the answer is 0.25",
        "bucket_cap_mb = 4.0": "the answer is 4.0",
        "bucket_cap_mb = ...": "nothing is filled in",
    }
    right = ["bucket_cap_mb = 1.0", "bucket_cap_mb = 1"]
    try_answers(capsys, "07_ddp_buckets", "bucket_cap_mb", right, wrong)


def attaching_to(parameters):
    return f"""
class Mended(figures.PlantedDDP):
    def _attach(self):
        for parameter in {parameters}:
            parameter.register_post_accumulate_grad_hook(self._ready)
"""


@pytest.mark.slow
def test_the_second_exercise_takes_a_hook_for_each_parameter(capsys):
    right = [attaching_to("self.trained"), attaching_to("self.module.parameters()")]
    wrong = {
        attaching_to("..."): "nothing is filled in",
        attaching_to("2 * self.trained"): "'mean gradients': False",
        "class Mended(figures.PlantedDDP): ...": "'mean gradients': False",
        attaching_to("[]"): "'buckets sent during backward': '0 of 2'",
        attaching_to("self.trained[1:]"): "'buckets sent during backward': '1 of 2'",
    }
    try_answers(capsys, "07_ddp_buckets", "Mended", right, wrong)
