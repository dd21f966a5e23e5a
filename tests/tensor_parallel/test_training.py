"""A model in pieces trains as one process; PyTorch's does too, and mistakes do not."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab import pretend
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.tensor_parallel import figures, torch_plan, training
from mgpu_tutorial.tensor_parallel.operators import sum_of

OURS = training.in_pieces, training.in_slices
THEIRS = torch_plan.by_torch, torch_plan.by_torch_in_slices
WAYS = [*OURS, *THEIRS]
TIED_AND_GROUPED = {"tied": True, "kv_heads": 4}


def train_alone(steps, **model):
    """Losses, first gradients and last parameters of a plain loop in one process."""
    model = training.new_model(torch.float64, **model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, gradients = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        tokens, targets = training.new_batch(step)
        loss = cross_entropy(model(tokens).transpose(1, 2), targets)
        loss.backward()
        gradients = gradients or {n: p.grad.clone() for n, p in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients, {name: p.detach() for name, p in model.named_parameters()}


def take_gradients(rank, world_size, way, **model):
    """The whole gradients of the first batch by name."""
    trainable = way(training.new_model(torch.float64, **model))
    training.loss_and_gradients(trainable)
    return training.whole_gradients(trainable.model)


@pytest.mark.parametrize(
    ("world_size", "way", "model"),
    [(2, way, {}) for way in WAYS]
    + [(3, way, {}) for way in OURS]
    + [(4, way, TIED_AND_GROUPED) for way in OURS],
)
def test_gradients_are_those_of_one_process(ranks, world_size, way, model):
    _, expected, _ = train_alone(1, **model)
    report = ranks(world_size, take_gradients, way, **model)
    assert largest_difference(report.results, [expected] * world_size) < 1e-13


@pytest.mark.parametrize(
    ("world_size", "way", "model"),
    [(2, way, TIED_AND_GROUPED) for way in WAYS] + [(3, way, {}) for way in OURS],
)
def test_steps_are_those_of_one_process_and_of_all_ranks(ranks, world_size, way, model):
    losses, _, values = train_alone(2, **model)
    double = {"dtype": torch.float64, "steps": 2}
    report = ranks(world_size, training.train, way, **double, **model)
    for found in report.results:
        assert found[0] == pytest.approx(losses, abs=1e-12)
        # Adam divides by the size of a gradient, which may be small: 1e-16 grows
        assert largest_difference(found[1], values) < 1e-11
        assert largest_difference(found, report.results[0]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
def test_a_mesh_trains_as_one_process(ranks, shape):
    # each replica reads two sequences, and the mesh together what one process reads
    double = {"steps": 2, "dtype": torch.float64}
    model = training.new_model(torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        tokens, targets = training.new_batch(step, sequences=2 * shape[0])
        cross_entropy(model(tokens).transpose(1, 2), targets).backward()
        optimizer.step()
    expected = dict(model.named_parameters())
    report = ranks(4, torch_plan.train_on_a_mesh, shape, **double)
    assert largest_difference(report.results, [expected] * 4) < 1e-11


def test_the_targets_are_the_tokens_that_follow():
    batches = [training.new_batch(step) for step in range(2)]
    for tokens, targets in batches:
        assert tokens.shape == targets.shape == (4, 12)
        assert torch.equal(tokens[:, 1:], targets[:, :-1])
        assert tokens.max() < training.VOCABULARY and len(tokens.unique()) > 20
    assert not torch.equal(batches[0][0], batches[1][0])


# Mistakes


class SumBothWays(torch.autograd.Function):
    """The sum of all ranks in forward, and once more in backward."""

    @staticmethod
    def forward(ctx, part, group):
        ctx.group = group
        return sum_of(part, group)

    @staticmethod
    def backward(ctx, gradient):
        return sum_of(gradient, ctx.group), None


def with_sum_both_ways(model):
    """A mistake that equal bits do not find."""
    return training.in_pieces(model, leave=SumBothWays)


@pytest.mark.parametrize(
    ("way", "loss_off", "gradients_off", "differ"),
    [
        *((way, (0, 1e-6), (0, 1e-6), 0) for way in OURS),
        (training.without_copy_to_ranks, (0, 1e-6), (0.3, 0.4), 13),
        (with_sum_both_ways, (0, 1e-6), (0.4, 0.6), 0),
        (training.without_mask, (0.002, 0.007), (0.001, 0.01), 0),
        (training.without_sum_of_replicated, (0, 1e-6), (0.08, 0.1), 13),
    ],
)
def test_mistakes_are_as_the_chapter_says(ranks, way, loss_off, gradients_off, differ):
    ((alone,),) = ranks(1, figures.step_once, (training.whole,)).results
    for (found,) in ranks(2, figures.step_once, (way,)).results:
        off = figures.distance(found.gradients, alone.gradients)
        assert loss_off[0] <= abs(found.loss / alone.loss - 1) <= loss_off[1]
        assert gradients_off[0] <= off <= gradients_off[1]
        assert len(found.different) == differ


def test_the_exercise_hides_two_parameters(ranks):
    first, second = ranks(2, figures.step_with_a_bug).results
    assert [name for name in first if first[name] != second[name]] == figures.FORGOTTEN
    assert len(first) == 13


def what_is_hidden(rank, world_size, x, weight):
    return x.isnan(), weight.isnan()


def test_the_other_exercise_hides_what_others_have(ranks):
    x, weight = torch.ones(2, 12), torch.ones(3, 12)
    report = ranks(4, figures.blindfold, what_is_hidden, x, weight)
    for rank, hidden in enumerate(report.results):
        theirs = torch.tensor([feature // 3 != rank for feature in range(12)])
        assert all((mask == theirs).all() for mask in hidden)


# What is sent, and what is kept


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_block_sends_eight_times_its_activations(ranks, world_size):
    report = ranks(world_size, figures.trace_steps, OURS, (1, 2), trace=True)
    pieces, slices = (
        figures.sent(report, f"{way.__name__} 2") - figures.sent(report, f"{way.__name__} 1")
        for way in OURS
    )
    expected = 8 * 4 * 12 * 48 * 4 * (world_size - 1) // world_size  # batch, sequence, width
    assert pieces == {"all_reduce": expected}
    assert slices == {
        "all_gather_single": expected // 2,
        "reduce_scatter_single": expected // 2,
        "all_reduce": 2 * 5 * 48 * 4 * (world_size - 1) // world_size,  # two norms, a bias
    }
    assert figures.formula(4, 12, 48, world_size) == expected


def test_slices_keep_less_for_backward(ranks):
    for pieces, slices in ranks(2, figures.count_kept, OURS).results:
        # half of x and of what a norm makes of it, five times; and a few numbers per token
        assert 0.8 < slices / pieces < 0.95


def test_we_send_as_often_as_torch(ranks):
    for counts in ranks(2, figures.count_calls, tuple(WAYS)).results:
        assert counts["in pieces"] == counts["by torch"] == {"all_reduce": 13}
        # ours add up all replicated gradients at once, and scatter what the embedding finds
        ours = {"all_gather": 10, "reduce_scatter": 10, "all_reduce": 4}
        assert counts["in slices"] == ours


@pytest.mark.slow
def test_a_larger_mesh_makes_the_same_calls():
    small = pretend(figures.step_on_a_mesh, (2, 2), world_size=4)
    large = pretend(figures.step_on_a_mesh, (8, 8), world_size=64)
    assert small.calls == large.calls
    assert small.calls["all_reduce"] == 13  # those of tensor parallel
    assert small.calls["all_gather"] == 5 and small.calls["reduce_scatter"] == 3
    assert small.nbytes["all_reduce"] == large.nbytes["all_reduce"]
    assert large.returned["blocks.0.mlp.up.weight"] == [4, 64]  # of 256 by 64
    assert large.returned["norm.weight"] == [8]


def test_placements_are_those_of_the_product(ranks):
    for found in ranks(2, torch_plan.multiply_by_placements).results:
        titles = [title.partition(": ")[2] for title in found]
        shards = ["Shard(dim=1)", "Shard(dim=1)", "Shard(dim=0)"]
        assert titles == ["Replicate()", *shards, "Partial(sum)", "Replicate()"]
        assert found["result: Replicate()"].tolist() == [[19, 11], [43, 25]]


# Rounding


def test_reordered_sums_are_the_same_function():
    plain = figures.gradients(training.whole(training.new_model(torch.float64)))
    for seed in range(3):
        again = figures.reordered(training.new_model(torch.float64), 3, seed)
        assert 0 < figures.distance(figures.gradients(again), plain) < 1e-14


def test_the_band_ends_at_twice_the_farthest_order():
    ways = {"near": {"float32": 4.0}, "far": {"float32": 4.1}}
    table = figures.verdicts(figures.Band({"float32": [1.0, 2.0]}, ways))
    ends, near, far = (row[1] for row in table.rows)
    assert (ends, near, far) == ("4.0e+00", "4.0e+00 inside", "4.1e+00 outside")


@pytest.mark.slow
def test_only_rounding_separates_us_from_one_process():
    wrong = training.without_mask
    ways = {"2": (2, OURS[0]), "s": (2, OURS[1]), "no": (2, wrong), "no4": (4, wrong)}
    band = figures.measure_band(ways)
    for dtype, orders in band.orders.items():
        limit = band.limit(dtype)
        assert all(map(math.isfinite, orders)) and 0 < min(orders) <= max(orders) == limit / 2
        assert len(set(orders)) > 2  # more than there are numbers of pieces
        assert band.ways["2"][dtype] < limit and band.ways["s"][dtype] < limit
        assert (band.ways["no"][dtype] > limit) == (dtype != "bfloat16")
        assert band.ways["no4"][dtype] > limit  # three rows of padding show in bfloat16 too
