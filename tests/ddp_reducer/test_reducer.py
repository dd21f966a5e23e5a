"""What torch's Reducer does with buckets, seen through a communication hook."""

import pytest
import torch

from mgpu_tutorial.ddp_buckets.experiments import Tower, run_each_setting
from mgpu_tutorial.ddp_reducer import measurements, reducer, unused
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
    settings = {name: options | {"width": 512} for name, options in SETTINGS.items()}
    first, second = launch(run_each_setting, 2, reducer.observe_buckets, settings).results
    assert first == second
    return first


def sizes(iterations):
    return measurements.sizes_in_mib(iterations, Tower(512, 6))


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
    # cut from the front of the definition, sent from its end, from the first step on
    names = [name for name, _ in Tower(512, 6).named_parameters()]
    assert seen["find"] == [[names[3:], names[:3]]] * 3
    assert sizes(seen["static"]) == ["6.0", "6.0", "1.0 + 5.0"]
    assert seen["view"] == seen["defaults"]


def test_torch_takes_a_bucket_size_that_is_not_positive_without_a_word(seen):
    assert [len(it) for it in seen["zero"]] == [1, 14, 14]
    assert [len(it) for it in seen["negative"]] == [1, 1, 1]


def test_a_view_saves_the_second_memory_of_every_gradient():
    nbytes = 4 * (6 * (512 * 512 + 512) + 512 * 10 + 10)
    views = {str(v): {"gradient_as_bucket_view": v} for v in (False, True)}
    twice = {"parameters": nbytes, "buckets": nbytes, "gradients": nbytes}
    once = {"parameters": nbytes, "buckets": nbytes}
    results = launch(run_each_setting, 2, reducer.count_memory, views).results
    assert results == [{"False": twice, "True": once}] * 2


def held_after_zero_grad(rank, world_size, **options):
    model = reducer.DistributedDataParallel(Tower(), **options)
    model(torch.ones(2, 64)).sum().backward()
    model.zero_grad()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("view", [False, True])
def test_zero_grad_drops_every_gradient_with_views_or_without(view):
    held = launch(held_after_zero_grad, 2, gradient_as_bucket_view=view).results
    assert held == [[None] * 10] * 2


def out_of_order(rank, world_size):
    """Layers of 256 KiB, used backwards: when each is ready, and which bucket leaves then."""
    layers = unused.UpsideDown(0.0)
    moments = []
    for i, layer in enumerate(layers.layers):
        layer.weight.register_post_accumulate_grad_hook(
            lambda p, i=i: moments.append(f"ready {i}")
        )
    options = {"bucket_cap_mb": 0.25, "find_unused_parameters": True}
    model = reducer.DistributedDataParallel(layers, **options)

    def hook(state, bucket):
        moments.append(f"bucket {bucket.index()} leaves")
        return reducer.allreduce_hook(None, bucket)

    model.register_comm_hook(None, hook)
    model(torch.ones(2, 256)).sum().backward()
    return moments


def test_buckets_leave_in_the_order_of_their_numbers():
    """The first layer is ready first and lies in the last bucket: five full ones wait."""
    ready = [f"ready {i}" for i in range(6)]
    leaves = [f"bucket {i} leaves" for i in range(6)]
    for moments in launch(out_of_order, 2).results:
        assert [m for m in moments if m in ready] == ready
        assert [m for m in moments if m in leaves] == leaves
        assert moments.index("bucket 0 leaves") > moments.index("ready 4")


def test_the_buckets_do_not_depend_on_the_number_of_ranks():
    options = {"width": 256, "bucket_cap_mb": 0.5}
    seen = launch(reducer.observe_buckets, 2, **options).results[0]
    report = launch(reducer.pretend_world, 1, 1024, backend="none", **options)
    assert report.results == [(seen, 1024)] and len(seen[1]) == 3


def test_the_log_tells_sizes_order_and_times():
    log = launch(reducer.read_ddp_log, 2, bucket_cap_mb=1).results[0]
    assert log["bucket_sizes"] == str(sum(p.nbytes for p in Tower(512, 6).parameters()))
    assert len(log["rebuilt_bucket_sizes"].split(", ")) == 6
    order = [int(i) for i in log["prev_iteration_grad_ready_order_indices"].split(", ")]
    assert order == [1, 0, *range(13, 1, -1)]
    overlap = log["avg_backward_compute_comm_overlap_time"]
    assert 0 < overlap <= log["avg_backward_comm_time"]


def parameters_by_hand(steps):
    """A Tower after SGD with momentum on the whole batches, in one process."""
    torch.manual_seed(0)
    tower = Tower()
    batches = torch.randn(steps, 24, 64, generator=torch.Generator().manual_seed(1))
    velocities = [torch.zeros_like(p) for p in tower.parameters()]
    for batch in batches:
        gradients = torch.autograd.grad((tower(batch) ** 2).mean(), list(tower.parameters()))
        with torch.no_grad():
            for p, v, gradient in zip(tower.parameters(), velocities, gradients, strict=True):
                v.mul_(0.9).add_(gradient)
                p -= 0.1 * v
    return [p.detach() for p in tower.parameters()]


def test_no_option_changes_what_is_learned():
    names = ["gradient_as_bucket_view", "static_graph", "find_unused_parameters"]
    settings = {name: {"steps": 4, name: True} for name in names} | {"none": {"steps": 4}}
    results = launch(run_each_setting, 3, reducer.train_with_options, settings).results
    expected = parameters_by_hand(steps=4)
    for found in results:
        for name in settings:
            torch.testing.assert_close(found[name], expected, msg=name)


def test_the_distance_from_one_process_is_seen(monkeypatch):
    assert measurements.apart_from_one_process(2) < 1e-6
    moved = [p + (i == 3) * 0.5 for i, p in enumerate(parameters_by_hand(steps=10))]
    monkeypatch.setattr(measurements, "train_alone", lambda steps: ([], moved))
    assert measurements.apart_from_one_process(2) == pytest.approx(0.5, abs=1e-5)
