"""What short numbers lose; scaled ranks take the steps of one process, written out here."""

from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.functional import nll_loss
from torch.nn.utils import clip_grad_norm_

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.mixed_precision import figures, precision
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet

SHORT = {"dtype": torch.float16, "init_scale": 2.0**21}


@cache
def trained_by_hand(dtype=torch.float32, parts=1, clip=1.0, skipped=None):
    """One process: four SGD steps on global batches of 120 digits; the parameters.

    Each batch is computed in `parts`, under autocast to `dtype`, on a scaled loss; their
    gradients are averaged in float32.
    """
    torch.manual_seed(0)
    model, data = SmallConvNet(), digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))
    for step in range(4):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for mine in order[120 * step : 120 * step + 120].tensor_split(parts):
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                loss = nll_loss(model(data.images[mine]), data.labels[mine])
            gradients = torch.autograd.grad(1024 * loss, list(model.parameters()))
            for whole, part in zip(total, gradients, strict=True):
                whole += part.float() / parts
        for parameter, whole in zip(model.parameters(), total, strict=True):
            parameter.grad = whole / 1024
        clip_grad_norm_(model.parameters(), clip)
        if step != skipped:
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def look_and_step(model, optimizer, scaler):
    """The end of a step with DDP, which has averaged already."""
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


def test_shares_are_those_of_the_limits_written_out():
    """float16 has 2^-24 as its least number, 2^-14 as its least normal one, ends at 65504."""
    given = [2.0**-30, 2.0**-25, -(2.0**-24), 2.0**-15, -(2.0**-14), 1.0, 65504.0, 70000.0]
    assert figures.shares_in_float16(torch.tensor(given)) == (2 / 8, 2 / 8, 3 / 8, 1 / 8)


# One rank


@pytest.mark.parametrize("steps", [9, 12])
def test_a_scaler_halves_at_an_overflow_and_doubles_after_good_steps(steps):
    """From 2^24 four halvings until float16 holds the gradients; then three good steps."""
    settings = {"init_scale": 2.0**24, "growth_interval": 3}
    log, saved = precision.train_in_float16(range(steps), **settings)
    powers = (24, 23, 22, 21, 20, 20, 20, 21, 20, 20, 20, 21)[:steps]
    assert [step.scale for step in log] == [2.0**k for k in powers]
    assert [step.taken for step in log] == [power == 20 for power in powers]
    assert saved["scaler"]["scale"] == 2.0**20


def test_a_step_in_float16_is_one_on_its_own_hundred_digits():
    _, saved = precision.train_in_float16(range(5, 6), init_scale=1024.0)
    torch.manual_seed(0)
    model, data = SmallConvNet(), digits()
    with torch.autocast("cpu", torch.float16):
        loss = nll_loss(model(data.images[500:600]), data.labels[500:600])
    (1024 * loss).backward()
    expected = {name: p - 0.01 * p.grad / 1024 for name, p in model.named_parameters()}
    assert largest_difference(saved["model"], expected) < 1e-7


def test_a_checkpoint_with_the_scaler_goes_on_as_if_nothing_had_happened():
    settings = {"init_scale": 2.0**24, "growth_interval": 3}
    whole, at_the_end = precision.train_in_float16(range(9), **settings)
    _, saved = precision.train_in_float16(range(6), **settings)
    rest, resumed = precision.train_in_float16(range(6, 9), saved, **settings)
    assert rest == whole[6:] and resumed["scaler"] == at_the_end["scaler"]
    assert largest_difference(resumed["model"], at_the_end["model"]) == 0
    del saved["scaler"]
    lost, _ = precision.train_in_float16(range(6, 9), saved, **settings)
    assert [step.scale for step in lost] == [2.0**24, 2.0**23, 2.0**22]
    assert not any(step.taken for step in lost)


# Several ranks


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("ddp", "order"), [(False, precision.average_then_look), (True, look_and_step)]
)
def test_scaled_ranks_take_the_steps_of_one_process(ranks, world_size, dtype, ddp, order):
    results = ranks(world_size, precision.train_scaled, order, ddp, dtype=dtype).results
    for records, weights in results:
        assert largest_difference(weights, trained_by_hand(dtype, world_size)) < 1e-6
        assert [record.scale for record in records] == [1024] * 4
        assert torch.equal(weights, results[0][1])


@pytest.mark.parametrize(("world_size", "who"), [(2, 0), (2, 1), (3, 2)])
def test_one_infinity_makes_all_ranks_skip(ranks, world_size, who):
    results = ranks(world_size, precision.train_scaled, infinite=(who, 1)).results
    for rank, (records, weights) in enumerate(results):
        assert [record.scale for record in records] == [1024, 512, 512, 512]
        assert [r.finite_gradients for r in records] == [True, rank != who, True, True]
        assert [r[1:] for r in records] == [r[1:] for r in results[0][0]]
        assert records[0].weights == records[1].weights != records[2].weights
        assert largest_difference(weights, trained_by_hand(skipped=1)) < 1e-6


def test_ranks_that_look_before_they_average_part(ranks):
    wrong = precision.look_then_average
    (zero, _), (one, _) = ranks(2, precision.train_scaled, wrong, infinite=(1, 1)).results
    assert zero[0] == one[0]
    assert zero[1].scale == 2 * one[1].scale and zero[1].weights != one[1].weights
    assert not zero[1].finite_weights and one[1].finite_weights
    assert not one[2].finite_weights  # rank 1 breaks a step later


def length_of_a_step(rank, world_size, order):
    """How far a step of learning rate 1 goes on a gradient of length 50, scaled by 8."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(model(torch.tensor([30.0, 40.0, 0.0])).sum()).backward()
    order(model, torch.optim.SGD(model.parameters(), lr=1.0), scaler)
    return model.weight.norm().item()


@pytest.mark.parametrize(
    ("order", "length"),
    [
        (precision.average_then_look, 1),
        (precision.look_then_average, 1),
        (precision.leave_out, 1),
        (precision.clip_then_unscale, 1 / 8),
    ],
)
def test_true_gradients_are_clipped_to_1_and_scaled_ones_to_less(ranks, order, length):
    assert ranks(1, length_of_a_step, order).results[0] == pytest.approx(length, rel=1e-4)


@pytest.mark.parametrize("step", [1, 3])
def test_a_rank_that_leaves_the_average_out_is_waited_for_not_for_ever(ranks, step):
    with pytest.raises(RankFailed, match="rank 1 returned while rank 0 still waited"):
        ranks(2, precision.train_scaled, precision.leave_out, infinite=(1, step))


def test_ranks_that_leave_out_as_many_averages_differ_and_nobody_waits(ranks):
    results = ranks(2, precision.train_scaled, precision.leave_out, **SHORT).results
    (zero, first), (one, second) = results
    assert zero[-1].weights != one[-1].weights
    assert [record.scale for record in zero] == [2.0**20, 2.0**20, 2.0**19, 2.0**19]
    assert [record.scale for record in one] == [2.0**20, 2.0**19, 2.0**19, 2.0**19]
    assert first.isfinite().all() and second.isfinite().all()


@pytest.mark.parametrize("right", [True, False])
def test_clipping_is_that_of_one_process_without_a_scale(ranks, right):
    order = None if right else precision.clip_then_unscale
    for weights in ranks(2, figures.train_clipped, order).results:
        distance = largest_difference(weights, trained_by_hand(clip=0.05, skipped=1))
        assert distance < 1e-6 if right else distance > 1e-4
