"""What torch's Reducer does with buckets, seen through a communication hook."""

import pytest

from mgpu_tutorial.ddp_buckets import reducer
from mgpu_tutorial.ddp_buckets.experiments import Setting, Tower, run_each_setting
from mgpu_tutorial.lab import launch

SETTINGS = {  # a Tower of six layers of 1 MiB: 6.03 MiB in all
    "defaults": {},
    "named": {"bucket_cap_mb": 25},
    "small": {"bucket_cap_mb": 2},
    "find": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "view": {"gradient_as_bucket_view": True},
    "zero": {"bucket_cap_mb": 0},
    "negative": {"bucket_cap_mb": -1},
}


@pytest.fixture(scope="module")
def seen():
    six_mib = Setting(batch=4, bucket_cap_mb=None)
    settings = {n: s | {"setting": six_mib} for n, s in SETTINGS.items()}
    first, second = launch(run_each_setting, 2, reducer.observe_buckets, settings).results
    assert first == second
    return first


def sizes(iterations):
    return reducer.sizes_in_mib(iterations, Tower(512, 6))


def test_one_bucket_first_then_rebuilt_in_the_order_of_readiness(seen):
    names = [name for name, _ in Tower(512, 6).named_parameters()]
    assert seen["small"][0] == [names]
    order = sum(seen["small"][1], [])
    assert order[:4] == ["head.bias", "head.weight", "body.5.bias", "body.5.weight"]
    assert order[-2:] == ["body.0.bias", "body.0.weight"] and order != names[::-1]
    assert seen["small"][2] == seen["small"][1]


def test_the_first_bucket_is_small_only_by_default(seen):
    assert sizes(seen["defaults"]) == ["6.0", "1.0 + 5.0", "1.0 + 5.0"]
    assert sizes(seen["named"]) == ["6.0"] * 3
    assert sizes(seen["small"]) == ["6.0", "2.0 + 2.0 + 2.0", "2.0 + 2.0 + 2.0"]


def test_what_the_options_change(seen):
    assert sizes(seen["find"]) == ["5.0 + 1.0"] * 3
    assert "head.weight" in seen["find"][1][-1]
    assert sizes(seen["static"]) == ["6.0", "6.0", "1.0 + 5.0"]
    assert seen["view"] == seen["defaults"]


def test_torch_takes_a_bucket_size_that_is_not_positive_without_a_word(seen):
    assert [len(it) for it in seen["zero"]] == [1, 14, 14]
    assert [len(it) for it in seen["negative"]] == [1, 1, 1]


def test_only_a_view_saves_the_second_memory():
    views = {str(v): {"gradient_as_bucket_view": v} for v in (False, True)}
    results = launch(run_each_setting, 2, reducer.compare_addresses, views).results
    assert results == [{"False": True, "True": False}] * 2


def test_the_buckets_do_not_depend_on_the_number_of_ranks():
    setting = Setting(width=256, batch=4, bucket_cap_mb=0.5)
    seen = launch(reducer.observe_buckets, 2, setting).results[0]
    report = launch(reducer.pretend_world, 1, 1024, setting, backend="none")
    assert report.results == [(seen, 1024)] and len(seen[1]) == 3


def test_the_log_tells_sizes_order_and_times():
    log = launch(reducer.read_ddp_log, 2, Setting(batch=64)).results[0]
    assert log["bucket_sizes"] == str(sum(p.nbytes for p in Tower(512, 6).parameters()))
    assert len(log["rebuilt_bucket_sizes"].split(", ")) == 6
    order = [int(i) for i in log["prev_iteration_grad_ready_order_indices"].split(", ")]
    assert order == [1, 0, *range(13, 1, -1)]
    overlap = log["avg_backward_compute_comm_overlap_time"]
    assert 0 < overlap <= log["avg_backward_comm_time"]
