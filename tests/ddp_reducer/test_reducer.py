"""What torch's Reducer does with buckets, seen through a communication hook."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.experiments import Tower, shares
from mgpu_tutorial.ddp_reducer import figures, reducer, unused
from tests.ddp_buckets.test_experiments import one_process

NAMES = [name for name, _ in Tower(512, 6).named_parameters()]


@pytest.mark.parametrize(
    "options, sizes",
    [
        ({}, ["6.0", "1.0 + 5.0", "1.0 + 5.0"]),  # the first bucket is small only by default
        ({"bucket_cap_mb": 25}, ["6.0"] * 3),
        ({"bucket_cap_mb": 2}, ["6.0", "2.0 + 2.0 + 2.0", "2.0 + 2.0 + 2.0"]),
        ({"gradient_as_bucket_view": True}, ["6.0", "1.0 + 5.0", "1.0 + 5.0"]),
        ({"static_graph": True}, ["6.0", "6.0", "1.0 + 5.0"]),
        ({"find_unused_parameters": True}, ["5.0 + 1.0"] * 3),
    ],
)
def test_the_sizes_of_the_buckets_in_three_iterations(ranks, options, sizes):
    """A Tower of six layers of 1 MiB: 6.03 MiB in all."""
    first, second = ranks(2, reducer.observe_buckets, width=512, **options).results
    assert first == second
    assert figures.sizes_in_mib(first, Tower(512, 6)) == sizes
    for buckets in first:
        assert sorted(sum(buckets, [])) == sorted(NAMES)


@pytest.mark.parametrize("cap, counts", [(0, [1, 14, 14]), (-1, [1, 1, 1])])
def test_torch_takes_a_bucket_size_that_is_not_positive_without_a_word(ranks, cap, counts):
    seen = ranks(2, reducer.observe_buckets, width=512, bucket_cap_mb=cap).results[0]
    assert [len(buckets) for buckets in seen] == counts


def test_one_bucket_first_then_rebuilt_in_the_order_of_readiness(ranks):
    seen = ranks(2, reducer.observe_buckets, width=512, bucket_cap_mb=2).results[0]
    assert seen[0] == [NAMES]
    order = sum(seen[1], [])
    assert order[:4] == ["head.bias", "head.weight", "body.5.bias", "body.5.weight"]
    assert order[-2:] == ["body.0.bias", "body.0.weight"] and order != NAMES[::-1]
    assert seen[2] == seen[1]


def test_the_search_cuts_from_the_front_of_the_definition_and_sends_from_its_end(ranks):
    options = {"find_unused_parameters": True}
    seen = ranks(2, reducer.observe_buckets, width=512, **options).results[0]
    assert seen == [[NAMES[3:], NAMES[:3]]] * 3


def train_while_noting(rank, world_size):
    model = DistributedDataParallel(Tower())
    iterations = reducer.note_buckets(model)
    (batch,) = shares(rank, world_size, 1, width=64)
    model(batch).square().mean().backward()
    return [p.grad for p in model.parameters()], len(iterations)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_hook_that_notes_averages_as_ddp_does(ranks, world_size):
    for gradients, iterations in ranks(world_size, train_while_noting).results:
        torch.testing.assert_close(gradients, one_process(1)[0])
        assert iterations == 1


@pytest.mark.parametrize("view", [False, True])
def test_a_view_saves_the_second_memory_of_every_gradient(ranks, view):
    nbytes = 4 * (6 * (512 * 512 + 512) + 512 * 10 + 10)
    expected = {"parameters": nbytes, "buckets": nbytes}
    if not view:
        expected["gradients"] = nbytes
    report = ranks(2, reducer.count_memory, gradient_as_bucket_view=view)
    assert report.results == [expected] * 2


def held_after_zero_grad(rank, world_size, **options):
    model = DistributedDataParallel(Tower(), **options)
    model(torch.ones(2, 64)).sum().backward()
    model.zero_grad()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("view", [False, True])
def test_zero_grad_drops_every_gradient_with_views_or_without(ranks, view):
    report = ranks(2, held_after_zero_grad, gradient_as_bucket_view=view)
    assert report.results == [[None] * 10] * 2


def out_of_order(rank, world_size):
    """Layers of 256 KiB, used backwards: when each is ready, and which bucket leaves then."""
    layers = unused.UpsideDown(0.0)
    moments = []
    for i, layer in enumerate(layers.layers):
        layer.weight.register_post_accumulate_grad_hook(
            lambda p, i=i: moments.append(f"ready {i}")
        )
    options = {"bucket_cap_mb": 0.25, "find_unused_parameters": True}
    model = DistributedDataParallel(layers, **options)

    def hook(state, bucket):
        moments.append(f"bucket {bucket.index()} leaves")
        return reducer.allreduce_hook(None, bucket)

    model.register_comm_hook(None, hook)
    model(torch.ones(2, 256)).sum().backward()
    return moments


def test_buckets_leave_in_the_order_of_their_numbers(ranks):
    """The first layer is ready first and lies in the last bucket: five full ones wait."""
    ready = [f"ready {i}" for i in range(6)]
    leaves = [f"bucket {i} leaves" for i in range(6)]
    for moments in ranks(2, out_of_order).results:
        assert [m for m in moments if m in ready] == ready
        assert [m for m in moments if m in leaves] == leaves
        assert moments.index("bucket 0 leaves") > moments.index("ready 4")


OPTIONS = ["gradient_as_bucket_view", "static_graph", "find_unused_parameters"]


@pytest.mark.parametrize("options", [{}, *({name: True} for name in OPTIONS)], ids=str)
def test_no_option_changes_what_is_learned(ranks, options):
    _, parameters = one_process(4)
    for found in ranks(3, reducer.train_with_options, steps=4, **options).results:
        torch.testing.assert_close(found, parameters)
