"""What short numbers lose; scaled ranks take the steps of one process, written out here."""

import warnings
from functools import cache

import pytest
import torch
from torch import nn
from torch.nn.functional import nll_loss
from torch.nn.utils import clip_grad_norm_

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.mixed_precision import figures, precision
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet

SHORT = {"dtype": torch.float16, "init_scale": 2.0**21}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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


def start():
    torch.manual_seed(0)
    return torch.cat([p.detach().flatten() for p in SmallConvNet().parameters()])


def look_and_step(model, optimizer, scaler):
    """The end of a step with DDP, which has averaged already."""
    scaler.unscale_(optimizer)
    clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


# Numbers


def test_shares_are_those_of_the_limits_written_out():
    """float16 has 2^-24 as its least number, 2^-14 as its least normal one, ends at 65504."""
    given = [2.0**-30, 2.0**-25, -(2.0**-24), 2.0**-15, -(2.0**-14), 1.0, 65504.0, 70000.0]
    assert figures.shares_in_float16(torch.tensor(given)) == (2 / 8, 2 / 8, 3 / 8, 1 / 8)


def test_the_gradients_are_those_that_backward_hands_to_the_first_convolution():
    """Their sum per channel is the gradient of its bias."""
    torch.manual_seed(0)
    model, data = SmallConvNet(), digits()
    nll_loss(model(data.images[:60]), data.labels[:60]).backward()
    gradients = figures.gradients_behind_conv1(batch=60)
    assert (gradients != 0).all() and 10 < len(gradients) < 60 * 10 * 24 * 24
    total = gradients.double().sum().item()
    assert total == pytest.approx(model.conv1.bias.grad.sum().item(), abs=1e-6)


def test_the_picture_counts_gradients_and_its_areas_end_where_float16_does(monkeypatch):
    rows = {"one": torch.tensor([1.5, -1.5, 2.0**-20]), "two": torch.ones(3)}
    picture = figures.gradient_picture(rows)
    assert picture.png and repr(picture).endswith("a row each: one, two")
    monkeypatch.setattr(figures, "Plot", lambda figure, text: figure)
    for axes, gradients in zip(
        figures.gradient_picture(rows).axes, rows.values(), strict=True
    ):
        zero, low, *bars, infinite = axes.patches
        counted = {bar.get_x(): bar.get_height() for bar in bars if bar.get_height()}
        powers = gradients.abs().log2().floor().tolist()
        assert counted == {power: powers.count(power) for power in powers}
        edges = [low.get_x(), low.get_x() + low.get_width(), infinite.get_x()]
        assert zero.get_x() + zero.get_width() == edges[0]
        for edge, below in zip(edges, range(3), strict=True):
            for step, share in ((-0.01, below), (0.01, below + 1)):
                shares = figures.shares_in_float16(torch.tensor([2.0 ** (edge + step)]))
                assert shares.index(1.0) == share


# Autocast and the scaler


def test_autocast_casts_products_and_leaves_weights_and_gradients():
    net = SmallConvNet(norm="batch")
    with precision.autocast("cpu", torch.bfloat16):
        seen = figures.observe(net, torch.randn(4, 1, 28, 28))
        net(torch.randn(4, 1, 28, 28)).float().sum().backward()
    assert seen == dict.fromkeys(("conv1", "norm", "conv2", "drop", "fc1", "fc2"), "bfloat16")
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}
    assert not any(module._forward_hooks for module in net.modules())


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8])
def test_an_unsupported_dtype_is_refused_before_torch_only_warns(dtype):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with torch.autocast("cpu", dtype=dtype):
            pass
    assert "not supported" in str(said[0].message)
    with pytest.raises(ValueError, match=f"autocast on cpu supports .*got {dtype}"):
        precision.autocast("cpu", dtype)
    with pytest.raises(ValueError, match="autocast on abacus supports nothing"):
        precision.autocast("abacus", torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_block_computes_in_its_format_and_float32_switches_autocast_off(dtype):
    layer = nn.Linear(2, 2)
    with precision.autocast("cpu", torch.bfloat16), precision.autocast("cpu", dtype):
        assert layer(torch.ones(1, 2)).dtype == dtype


def test_a_scaler_is_made_for_the_parameters_it_serves():
    scaler = precision.new_scaler(nn.Linear(2, 2), init_scale=8.0)
    assert scaler.is_enabled() and scaler.get_scale() == 8
    parts = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"parameters lie on \['cpu', 'meta'\]"):
        precision.new_scaler(parts)


@pytest.mark.parametrize("short", [[0], [1], [0, 1]], ids=str)
def test_a_scaler_refuses_parameters_in_float16_all_or_some(short):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for layer in short:
        model[layer].half()
    with pytest.raises(ValueError, match="parameters are float16.*keep the model in float32"):
        precision.new_scaler(model)
    precision.new_scaler(model.bfloat16())  # which has float32's range


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
def test_scaled_ranks_take_the_steps_of_one_process(ranks, world_size):
    results = ranks(world_size, precision.train_scaled).results
    for records, weights in results:
        assert largest_difference(weights, trained_by_hand()) < 1e-6
        assert [record.scale for record in records] == [1024] * 4
        assert torch.equal(weights, results[0][1]) and records == results[0][0]


@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_a_scale_in_float32_changes_no_bit(ranks, scale):
    _, plain = ranks(1, precision.train_scaled).results[0]
    _, scaled = ranks(1, precision.train_scaled, init_scale=scale).results[0]
    assert torch.equal(plain, scaled)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("ddp", "order"), [(False, precision.average_then_look), (True, look_and_step)]
)
def test_ranks_under_autocast_take_the_steps_written_out(ranks, dtype, ddp, order):
    results = ranks(2, precision.train_scaled, order, ddp, dtype=dtype).results
    (_, first), (_, second) = results
    assert torch.equal(first, second)
    assert largest_difference(first, trained_by_hand(dtype, parts=2)) < 1e-6


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


def test_clipping_before_unscaling_hardly_moves_and_says_nothing(ranks):
    """Clipped to 1 and then divided by 1024: no gradient is longer than that, in 4 steps."""
    results = ranks(2, precision.train_scaled, precision.clip_then_unscale).results
    for records, weights in results:
        assert all(r.finite_weights and r.scale == 1024 for r in records)
        way = (weights - start()).norm().item()
        assert 0 < way <= 4 * 2 * 0.01 / 1024  # momentum 0.5: twice
        assert figures.moved(weights) == pytest.approx(way)
    assert (trained_by_hand() - start()).norm() > 100 * way


def length_of_a_step(rank, world_size, order):
    """How far a step of learning rate 1 goes on a gradient of length 50, scaled by 8."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    scaler = precision.new_scaler(model, init_scale=8.0)
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


def test_both_ranks_skip_when_one_overflows_under_autocast(ranks):
    """At 2^21 both overflow; at 2^20 rank 1 does, whose images differ; at 2^19 nobody."""
    order = precision.average_then_look
    (zero, weights), (one, _) = ranks(2, precision.train_scaled, order, **SHORT).results
    assert [record.finite_gradients for record in zero] == [False, True, True, True]
    assert [record.finite_gradients for record in one] == [False, False, True, True]
    for records in (zero, one):
        assert [record.scale for record in records] == [2.0**20, *[2.0**19] * 3]
    assert zero[-1].weights == one[-1].weights and weights.isfinite().all()


def test_the_table_says_who_met_an_infinity():
    zero = [(False, 2.0**20, "a", True), (True, 2.0**20, "b", False), (True, 8.0, "c", True)]
    one = [(False, 2.0**20, "a", True), (False, 2.0**19, "a", True), (True, 8.0, "c", True)]
    ranks = [([precision.StepRecord(*step) for step in steps], None) for steps in (zero, one)]
    assert figures.steps_table(Report(2, results=ranks)).rows == [
        [0, "both", "2^20", "2^20", "alike", "finite", "finite"],
        [1, "rank 1", "2^20", "2^19", "differ", "broken", "finite"],
        [2, "", "2^3", "2^3", "alike", "finite", "finite"],
    ]
