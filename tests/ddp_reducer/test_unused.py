"""Parameters without a gradient: who complains, who waits, what each cure gives and costs."""

import pytest

from mgpu_tutorial.ddp_buckets.experiments import run_each_setting
from mgpu_tutorial.ddp_reducer import measurements, unused
from mgpu_tutorial.ddp_reducer.reducer import note_buckets
from mgpu_tutorial.lab import RankFailed, launch

NOBODY, FIRST_ONLY = (None, None), (1.0, None)


def test_an_unused_parameter_fails_at_the_next_forward_and_names_its_index():
    with pytest.raises(RankFailed, match="Expected to have finished reduction") as caught:
        launch(unused.train_two_heads, 2, NOBODY)
    said = [out.splitlines() for out in caught.value.report.stdout]
    assert said[0] == ["forward 0 done", "backward 0 done: gradient 2.0"]
    assert said[1][-1] == "backward 0 done: gradient 4.0"  # never averaged
    assert "did not receive grad for rank 0: 2 3" in caught.value.tracebacks[0]


def test_the_cures_for_unused_parameters():
    cures = {
        "find": {"second": NOBODY, "find_unused_parameters": True},
        "static": {"second": NOBODY, "static_graph": True},
        "zero": {"second": (0.0, 0.0)},
        "one rank": {"second": FIRST_ONLY, "find_unused_parameters": True},
    }
    # the second head: 2 on rank 0 and nothing on rank 1
    expected = {"find": [3.0, None], "static": [3.0, None], "zero": [3.0, 0.0]}
    expected["one rank"] = [3.0, 1.0]
    results = launch(run_each_setting, 2, unused.train_two_heads, cures).results
    assert results == [expected] * 2


def test_the_rank_that_used_everything_waits_for_the_one_that_did_not():
    with pytest.raises(
        RankFailed, match="rank 1 returned while rank 0 still waited"
    ) as caught:
        launch(unused.train_two_heads, 2, FIRST_ONLY, steps=1, timeout=10)
    assert caught.value.report.stdout == [
        "forward 0 done\n",
        "forward 0 done\nbackward 0 done: gradient 4.0\n",
    ]


def test_in_the_next_step_the_other_rank_raises():
    with pytest.raises(
        RankFailed, match="rank 1 raised RuntimeError: Expected to have"
    ) as caught:
        launch(unused.train_two_heads, 2, FIRST_ONLY)
    assert caught.value.report.stdout[0] == "forward 0 done\n"


def break_the_promise(rank, world_size):
    model = unused.DistributedDataParallel(unused.TwoHeads(), static_graph=True)
    for second in (None, None, 1.0):
        model(unused.torch.ones(2, 4), second).sum().backward()


def test_a_broken_promise_of_a_static_graph_is_told():
    with pytest.raises(RankFailed, match="Your training graph has changed in this iteration"):
        launch(break_the_promise, 2)


def leave_out_at_last(rank, world_size, second, again=False):
    model = unused.DistributedDataParallel(unused.TwoHeads(), static_graph=True)
    for now in (1.0, 1.0, second[rank], *[1.0] * again):
        model(unused.torch.ones(2, 4), now).sum().backward()


def test_a_head_left_out_of_a_static_graph_is_told_only_by_the_next_forward():
    launch(leave_out_at_last, 2, NOBODY)  # in the last step nobody is told
    with pytest.raises(RankFailed, match="Expected to have finished reduction"):
        launch(leave_out_at_last, 2, NOBODY, again=True)
    with pytest.raises(RankFailed, match="rank 1 returned while rank 0 still waited"):
        launch(leave_out_at_last, 2, FIRST_ONLY, timeout=10)


CALLS = {6: 1, 70: 2}  # by depth: those of a step without the search


@pytest.fixture(scope="module")
def profiled():
    """What each rank sees in a step by depth, without the search and with it."""
    settings = {
        (depth, search): {"depth": depth, "find_unused_parameters": search}
        for depth in CALLS
        for search in (False, True)
    }
    return launch(run_each_setting, 2, measurements.profile_search, settings).results


@pytest.mark.parametrize("depth", CALLS)
def test_the_search_makes_one_call_more(profiled, depth):
    for found in profiled:
        assert found[depth, False] == (CALLS[depth], 0.0)
        calls, microseconds = found[depth, True]
        assert calls == CALLS[depth] + 1 and microseconds > 0


def sent_during_backward(report):
    """How many buckets rank 0 sent before its first layer's backward, the last, was over."""
    sent = [e for e in report.events if e.op == "all_reduce" and e.rank == 0]
    (step,) = [e for e in report.events if e.note == "step 3" and e.rank == 0]
    inside = [e for e in sent if step.begin < e.begin < step.end]
    assert len(inside) == 6
    return sum(e.begin < step.begin + 0.090 for e in inside)


def test_buckets_that_are_never_rebuilt_leave_only_after_backward():
    options = {"trace": True, "find_unused_parameters": True}
    searched = launch(unused.train_upside_down, 2, seconds=1e-3, **options)
    assert sent_during_backward(searched) == 0
    assert measurements.step_milliseconds(searched, "step 3") >= 90 + 6


def first_bucket(rank, world_size, **options):
    """Which layer of UpsideDown is sent first in the third iteration."""
    model = unused.DistributedDataParallel(
        unused.UpsideDown(0.0), bucket_cap_mb=0.25, **options
    )
    seen = note_buckets(model)
    for _ in range(3):
        model(unused.torch.ones(2, 256)).sum().backward()
    return seen[2][0]


def test_the_layer_that_is_ready_first_is_sent_first_only_in_rebuilt_buckets():
    settings = {search: {"find_unused_parameters": search} for search in (False, True)}
    for found in launch(run_each_setting, 2, first_bucket, settings).results:
        assert found == {False: ["layers.0.weight"], True: ["layers.5.weight"]}


def test_layers_in_the_order_of_their_use_are_sent_in_time_even_with_the_search():
    options = {"trace": True, "find_unused_parameters": True, "in_order": True}
    searched = launch(unused.train_upside_down, 2, seconds=1e-3, **options)
    assert sent_during_backward(searched) >= 3
