"""A model in pieces trains as one process; PyTorch's does too, and mistakes do not."""

from functools import partial

import pytest
import torch
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.tensor_parallel import figures, torch_plan, training

OURS = training.in_pieces, training.in_slices
WAYS = [*OURS, torch_plan.by_torch, torch_plan.by_torch_in_slices]
TIED_AND_GROUPED = {"tied": True, "kv_heads": 4}


def train_alone(steps, sequences=4, **model):
    """Losses, first gradients and last parameters of a plain loop in one process."""
    model = training.new_model(torch.float64, **model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, gradients = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        tokens, targets = training.new_batch(step, sequences)
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
    report = ranks(world_size, training.train, way, steps=2, dtype=torch.float64, **model)
    for found in report.results:
        assert found[0] == pytest.approx(losses, abs=1e-12)
        # Adam divides by the size of a gradient, which may be small: 1e-16 grows
        assert largest_difference(found[1], values) < 1e-11
        assert largest_difference(found, report.results[0]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
def test_a_mesh_trains_as_one_process(ranks, shape):
    _, _, expected = train_alone(2, sequences=2 * shape[0])
    report = ranks(4, torch_plan.train_on_a_mesh, shape, steps=2, dtype=torch.float64)
    assert largest_difference(report.results, [expected] * 4) < 1e-11


def test_the_targets_are_the_tokens_that_follow():
    (tokens, targets), (others, _) = training.new_batch(0), training.new_batch(1)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert not torch.equal(tokens, others) and len(tokens.unique()) > 20


@pytest.mark.parametrize(
    ("way", "loss_off", "gradients_off", "differ"),
    [
        *((way, (0, 1e-6), (0, 1e-6), 0) for way in OURS),
        (training.without_copy_to_ranks, (0, 1e-6), (0.3, 0.4), 13),
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


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_block_sends_eight_times_its_activations(ranks, world_size):
    report = ranks(world_size, figures.trace_steps, OURS, (1, 2), trace=True)
    pieces, slices = (
        figures.sent(report, f"{way.__name__} 2") - figures.sent(report, f"{way.__name__} 1")
        for way in OURS
    )
    expected = 8 * 4 * 12 * 48 * 4 * (world_size - 1) // world_size  # batch, sequence, width
    copies = 2 * 5 * 48 * 4 * (world_size - 1) // world_size  # two norms, a bias
    assert pieces == {"all_reduce": expected}
    half = {"all_gather_single": expected // 2, "reduce_scatter_single": expected // 2}
    assert slices == half | {"all_reduce": copies}


def test_reordered_sums_are_the_same_function():
    plain = figures.gradients(training.whole, torch.float64)
    way = partial(figures.reordered, pieces=3, seed=0)
    assert 0 < figures.distance(figures.gradients(way, torch.float64), plain) < 1e-14


def test_an_exercise_hides_the_features_that_other_ranks_have(ranks):
    tensors = torch.ones(2, 12), torch.ones(3, 12)
    report = ranks(4, figures.blindfold, lambda rank, n, *shown: shown, *tensors)
    for rank, shown in enumerate(report.results):
        mine = torch.arange(12) // 3 == rank
        assert all(torch.equal(~one.isnan(), mine.expand_as(one)) for one in shown)
