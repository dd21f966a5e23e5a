"""A model in pieces trains as one process; PyTorch's does too, and mistakes do not."""

import math
from functools import cache

import pytest
import torch

from mgpu_tutorial.lab import launch, pretend
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.tensor_parallel import (
    exercises,
    measurements,
    mesh,
    mistakes,
    torch_plan,
    training,
)
from mgpu_tutorial.tensor_parallel import rounding_measurements as rounding
from tests.tensor_parallel import ranks
from tests.thorough import TRAINED, thorough

OURS = training.in_pieces, training.in_slices
THEIRS = torch_plan.by_torch, torch_plan.by_torch_in_slices
MISTAKES = (
    mistakes.without_copy_to_ranks,
    ranks.with_sum_both_ways,
    mistakes.without_mask,
    mistakes.without_sum_of_replicated,
)
BOTH = {"": {}, "tied and grouped": {"tied": True, "kv_heads": 4}}
KINDS = BOTH | {"tied": {"tied": True}, "grouped": {"kv_heads": 4}}


def alone(rank, world_size, kinds):
    """What a plain loop in one process gives, for each kind of model."""
    found = {}
    for kind in kinds:
        model = training.new_model(torch.float64, **KINDS[kind])
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = []
        for step in range(2):
            optimizer.zero_grad()
            tokens, targets = training.new_batch(step)
            logits = model(tokens).transpose(1, 2)
            loss = torch.nn.functional.cross_entropy(logits, targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        values = {name: p.detach() for name, p in model.named_parameters()}
        found[kind] = losses, values
    return found


def train_all(rank, world_size, kinds, ways):
    found = {}
    for kind in kinds:
        for way in ways:
            double = {"dtype": torch.float64, "steps": 2}
            found[kind, way.__name__] = training.train(
                rank, world_size, way, **double, **KINDS[kind]
            )
    return found


def train_on_a_mesh(rank, world_size, shape):
    return mesh.train_on_a_mesh(rank, world_size, shape, steps=2, dtype=torch.float64)


WORKERS = {  # of how many ranks, each with its arguments
    1: {
        "alone": (alone, tuple(KINDS)),
        "step": (measurements.step_once, (training.whole,)),
        "trained": (train_all, ("",), OURS),
    },
    2: {
        "trained": (train_all, tuple(BOTH), OURS + THEIRS),
        "step": (measurements.step_once, (*OURS, *MISTAKES)),
        "kept": (measurements.count_kept, OURS),
        "calls": (measurements.count_calls, (*OURS, *THEIRS)),
        "placements": (torch_plan.multiply_by_placements,),
        "fingerprints": (exercises.fingerprints,),
    },
    3: {"trained": (train_all, ("",), OURS)},
    4: {"trained": (train_all, tuple(KINDS), OURS)},
}


@cache
def results(world_size):
    return launch(ranks.run_all, world_size, WORKERS[world_size]).results


def results_of(name, world_size):
    return [found[name] for found in results(world_size)]


def reference():
    return results_of("alone", 1)[0]


@pytest.mark.parametrize("world_size", [1, *TRAINED])
def test_steps_are_those_of_one_process(world_size):
    for found in results_of("trained", world_size):
        for (kind, _), (losses, values) in found.items():
            expected_losses, expected = reference()[kind]
            assert losses == pytest.approx(expected_losses, abs=1e-12)
            assert set(values) == set(expected)
            # Adam divides by the size of a gradient, which may be small: 1e-16 grows
            torch.testing.assert_close(values, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("world_size", TRAINED)
def test_all_ranks_end_with_the_same_bits(world_size):
    first, *others = results_of("trained", world_size)
    for other in others:
        for case, (losses, values) in first.items():
            assert other[case][0] == losses
            assert all(torch.equal(other[case][1][name], values[name]) for name in values)


def test_mistakes_are_as_the_chapter_says():
    (plain,) = results_of("step", 1)[0]
    names = [way.__name__ for way in (*OURS, *MISTAKES)]
    found = dict(zip(names, results_of("step", 2)[0], strict=True))
    off = {name: rounding.distance(s.gradients, plain.gradients) for name, s in found.items()}
    loss = {name: abs(s.loss - plain.loss) for name, s in found.items()}
    for right in OURS:
        assert off[right.__name__] < 1e-6 and found[right.__name__].different == []
    assert loss["without_copy_to_ranks"] < 1e-5 and off["without_copy_to_ranks"] > 0.1
    assert len(found["without_copy_to_ranks"].different) == 13
    assert loss["with_sum_both_ways"] < 1e-5 and off["with_sum_both_ways"] > 0.1
    assert found["with_sum_both_ways"].different == []
    assert 0.01 < loss["without_mask"] < 0.03 and found["without_mask"].different == []
    assert loss["without_sum_of_replicated"] < 1e-5
    assert len(found["without_sum_of_replicated"].different) == 13


@pytest.mark.parametrize("world_size", TRAINED)
def test_a_block_sends_eight_times_its_activations(world_size):
    found = measurements.sent_per_block(OURS, world_size)
    numbers = 4 * 12 * 48  # batch, sequence, width
    expected = 8 * numbers * 4 * (world_size - 1) // world_size
    assert found[training.in_pieces] == {"all_reduce": expected}
    replicated = 5 * 48 * 4  # two norms and a bias
    assert found[training.in_slices] == {
        "all_gather_single": expected // 2,
        "reduce_scatter_single": expected // 2,
        "all_reduce": 2 * replicated * (world_size - 1) // world_size,
    }
    assert measurements.formula(4, 12, 48, world_size) == expected


def test_slices_keep_less_for_backward():
    for pieces, slices in results_of("kept", 2):
        # half of x and of what a norm makes of it, five times; and a few numbers per token
        assert 0.8 < slices / pieces < 0.95


def test_we_send_as_often_as_torch():
    counts = results_of("calls", 2)[0]
    assert counts["in pieces"] == counts["by torch"] == {"all_reduce": 13}
    # ours add up all replicated gradients at once, and scatter what the embedding finds
    assert counts["in slices"] == {"all_gather": 10, "reduce_scatter": 10, "all_reduce": 4}


def test_the_furthest_rank_counts_and_what_is_no_number(monkeypatch):
    right, near, lost = (torch.tensor([1.0, x]) for x in (2.0, 2.5, math.nan))

    def furthest(*values):
        found = Report(2, results=[{"whole": {"weight": value}} for value in values])
        monkeypatch.setattr(measurements, "launch", lambda *_, **__: found)
        return measurements.furthest((training.whole,), 2, {"weight": right})["whole"]

    assert furthest(right, right) == 0.0
    assert furthest(right, near) == furthest(near, right) == 0.5
    assert furthest(right, lost) == furthest(lost, right) == math.inf


@cache
def band():
    wrong = mistakes.without_mask
    ways = {"2": (2, training.in_pieces), "s": (2, training.in_slices), "no": (2, wrong)}
    ways["no4"] = (4, wrong)
    return rounding.measure(ways)


@pytest.mark.parametrize("dtype", rounding.DTYPES)
def test_only_rounding_separates_us_from_one_process(dtype):
    limit = band().limit(dtype)
    orders = band().orders[dtype]
    assert all(map(math.isfinite, orders)) and 0 < min(orders) <= max(orders) == limit / 2
    assert len(set(orders)) > 2  # more than there are numbers of pieces
    assert band().ways["2"][dtype] < limit and band().ways["s"][dtype] < limit
    assert (band().ways["no"][dtype] > limit) == (dtype != "bfloat16")
    assert band().ways["no4"][dtype] > limit  # three rows of padding show even in bfloat16


def test_reordered_is_the_same_function():
    plain = rounding.gradients(training.whole(training.new_model(torch.float64)))
    again = rounding.reordered(training.new_model(torch.float64), 3, seed=0)
    assert 0 < rounding.distance(rounding.gradients(again), plain) < 1e-14


def test_placements_are_those_of_the_product():
    for found in results_of("placements", 2):
        titles = [title.partition(": ")[2] for title in found]
        shards = ["Shard(dim=1)", "Shard(dim=1)", "Shard(dim=0)"]
        assert titles == ["Replicate()", *shards, "Partial(sum)", "Replicate()"]
        assert found["result: Replicate()"].tolist() == [[19, 11], [43, 25]]


@thorough
def test_a_mesh_trains_as_one_process():
    _, expected = reference()[""]
    for values in launch(train_on_a_mesh, 4, (2, 2)).results:
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-11)


@thorough
def test_a_larger_mesh_makes_the_same_calls():
    small = pretend(measurements.step_on_a_mesh, (2, 2), world_size=4)
    large = pretend(measurements.step_on_a_mesh, (8, 8), world_size=64)
    assert small.calls == large.calls
    assert small.calls["all_reduce"] == 13  # those of tensor parallel
    assert small.calls["all_gather"] == 5 and small.calls["reduce_scatter"] == 3
    assert small.nbytes["all_reduce"] == large.nbytes["all_reduce"]
    assert large.returned["blocks.0.mlp.up.weight"] == [4, 64]  # of 256 by 64
    assert large.returned["norm.weight"] == [8]


def test_the_exercise_hides_two_parameters():
    first, second = results_of("fingerprints", 2)
    assert [name for name in first if first[name] != second[name]] == exercises.FORGOTTEN
    assert len(first) == 13


def test_link_table():
    rows = {row[0]: row for row in measurements.link_table().rows}
    # 8 · 8192 · 8192 · 2 bytes · 7/8, and 3 · 12 · 8192² / 8 · 2 bytes · 63/64
    assert rows["tensor parallel"][1:] == ["940 MB", "2.1", "18.8", "313.2"]
    assert rows["fully_shard"][1:] == ["595 MB", "1.3", "11.9", "198.2"]
    assert rows["compute"][2:] == ["12.4"] * 3
