"""What short numbers lose; scaled ranks take the steps of one process, written out here."""

import warnings
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn.functional import nll_loss
from torch.nn.utils import clip_grad_norm_

from mgpu_tutorial.lab import RankFailed, launch
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.mixed_precision import measurements, precision
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet
from tests.thorough import again
from tests.together import together


def near(x, y, atol):
    torch.testing.assert_close(x, y, rtol=0, atol=atol)


@cache
def trained_by_hand(steps=4, clip=1.0, skipped=None):
    """One process, no scaler: SGD on the global batches of 120 digits; the parameters."""
    torch.manual_seed(0)
    model, data = SmallConvNet(), digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))
    for step in range(steps):
        mine = order[120 * step : 120 * step + 120]
        optimizer.zero_grad()
        nll_loss(model(data.images[mine]), data.labels[mine]).backward()
        if clip:
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


SHORT = {"dtype": torch.float16, "init_scale": 2.0**21}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ORDERS = {False: precision.average_then_look, True: look_and_step}  # by whether with DDP
PLAIN = {"plain": partial(precision.train_scaled)}
INFINITE = {
    f"infinite on {who}": partial(precision.train_scaled, infinite=(who, 1)) for who in (0, 1)
}
CASES = {  # by the number of ranks
    1: PLAIN
    | {
        f"scale {scale}": partial(precision.train_scaled, init_scale=scale)
        for scale in (1.0, 2.0**16)
    },
    2: PLAIN
    | INFINITE
    | {
        "look then average": partial(
            precision.train_scaled, finish_step=precision.look_then_average, infinite=(1, 1)
        ),
        "clip then unscale": partial(
            precision.train_scaled, finish_step=precision.clip_then_unscale
        ),
        "clipped": measurements.train_clipped,
        "clipped too early": partial(
            measurements.train_clipped, finish_step=precision.clip_then_unscale
        ),
        "short": partial(precision.train_scaled, **SHORT),
        "short, left out": partial(
            precision.train_scaled, finish_step=precision.leave_out, **SHORT
        ),
        "short, look then average": partial(
            precision.train_scaled, finish_step=precision.look_then_average, **SHORT
        ),
    }
    | {
        f"{dtype}, ddp {ddp}": partial(
            precision.train_scaled, finish_step=order, ddp=ddp, dtype=dtype
        )
        for dtype in DTYPES
        for ddp, order in ORDERS.items()
    },
    3: PLAIN | INFINITE,
}


@cache
def trained(world_size):
    """What the ranks of each case return."""
    cases = CASES[world_size]
    return dict(zip(cases, together(world_size, *cases.values()), strict=True))


# Numbers


def test_shares_are_those_of_the_limits_written_out():
    """float16 has 2^-24 as its least number, 2^-14 as its least normal one, ends at 65504."""
    given = [2.0**-30, 2.0**-25, -(2.0**-24), 2.0**-15, -(2.0**-14), 1.0, 65504.0, 70000.0]
    found = measurements.shares_in_float16(torch.tensor(given))
    assert found == (2 / 8, 2 / 8, 3 / 8, 1 / 8)


def test_the_gradients_are_those_that_backward_hands_to_the_first_convolution():
    """Their sum per channel is the gradient of its bias."""
    torch.manual_seed(0)
    model, data = SmallConvNet(), digits()
    nll_loss(model(data.images[:60]), data.labels[:60]).backward()
    found = measurements.gradients_behind_conv1(batch=60)
    assert (found != 0).all() and 10 < len(found) < 60 * 10 * 24 * 24
    near(found.double().sum().float(), model.conv1.bias.grad.sum(), 1e-6)


def test_the_picture_has_a_row_per_name():
    picture = measurements.gradient_picture(
        {"one": torch.tensor([1.0]), "two": torch.ones(3)}
    )
    assert picture.png and repr(picture).endswith("a row each: one, two")


# Autocast and the scaler


def test_autocast_casts_products_and_leaves_weights_and_gradients():
    net = SmallConvNet(norm="batch")
    with precision.autocast("cpu", torch.bfloat16):
        seen = measurements.observe(net, torch.randn(4, 1, 28, 28))
        net(torch.randn(4, 1, 28, 28)).float().sum().backward()
    assert seen["conv1"] == seen["fc2"] == "bfloat16"
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


def test_float32_switches_autocast_off():
    layer = nn.Linear(2, 2)
    with precision.autocast("cpu", torch.bfloat16), precision.autocast("cpu", torch.float32):
        assert layer(torch.ones(1, 2)).dtype == torch.float32


def test_a_scaler_is_made_for_the_parameters_it_serves():
    assert precision.new_scaler(nn.Linear(2, 2), init_scale=8.0).is_enabled()
    with pytest.raises(ValueError, match="parameters are float16.*keep the model in float32"):
        precision.new_scaler(nn.Linear(2, 2).half())
    parts = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ValueError, match=r"parameters lie on \['cpu', 'meta'\]"):
        precision.new_scaler(parts)


SCALER = {"init_scale": 2.0**24, "growth_interval": 3}


@cache
def in_float16():
    return precision.train_in_float16(range(9), **SCALER)


def test_a_scaler_halves_at_an_overflow_and_doubles_after_good_steps():
    """From 2^24 four halvings until float16 holds the gradients; then three good steps."""
    log, _ = in_float16()
    assert [m.scale for m in log] == [2.0**k for k in (24, 23, 22, 21, 20, 20, 20, 21, 20)]
    assert [m.taken for m in log] == [False] * 4 + [True] * 3 + [False, True]


def test_a_checkpoint_with_the_scaler_goes_on_as_if_nothing_had_happened():
    whole, at_the_end = in_float16()
    _, saved = precision.train_in_float16(range(6), **SCALER)
    rest, resumed = precision.train_in_float16(range(6, 9), saved, **SCALER)
    assert rest == whole[6:] and resumed["scaler"] == at_the_end["scaler"]
    for name, weights in at_the_end["model"].items():
        assert torch.equal(resumed["model"][name], weights)
    del saved["scaler"]
    lost, _ = precision.train_in_float16(range(6, 9), saved, **SCALER)
    assert [m.scale for m in lost] == [2.0**24, 2.0**23, 2.0**22]
    assert not any(m.taken for m in lost)


def test_a_scale_in_float32_changes_no_bit():
    plain, scaled = (trained(1)[f"scale {scale}"][0][1] for scale in (1.0, 2.0**16))
    assert torch.equal(plain, scaled)


# Several ranks


@pytest.mark.parametrize("world_size", [1, 2, again(3)])
def test_scaled_ranks_take_the_steps_of_one_process(world_size):
    results = trained(world_size)["plain"]
    for records, weights in results:
        near(weights, trained_by_hand(), 1e-6)
        assert [record.scale for record in records] == [1024] * 4
        assert torch.equal(weights, results[0][1]) and records == results[0][0]


@pytest.mark.parametrize("world_size", [2, again(3)])
def test_one_infinity_makes_all_ranks_skip(world_size):
    for who in (0, 1):
        results = trained(world_size)[f"infinite on {who}"]
        records, weights = results[0]
        assert [record.scale for record in records] == [1024, 512, 512, 512]
        assert records[0].weights == records[1].weights != records[2].weights
        assert weights.isfinite().all()
        for rank, (others, _) in enumerate(results):
            own = [record.finite_gradients for record in others]
            assert own == [True, rank != who, True, True]
            assert [r[1:] for r in others] == [r[1:] for r in records]


def test_ranks_that_look_before_they_average_part():
    (zero, _), (one, _) = trained(2)["look then average"]
    assert zero[0] == one[0]
    assert zero[1].scale == 2 * one[1].scale and zero[1].weights != one[1].weights
    assert not zero[1].finite_weights and one[1].finite_weights
    assert not one[2].finite_weights  # rank 1 breaks a step later


def test_clipping_before_unscaling_hardly_moves_and_says_nothing():
    """Clipped to 1 and then divided by 1024: no gradient is longer than that, in 4 steps."""
    torch.manual_seed(0)
    start = torch.cat([p.detach().flatten() for p in SmallConvNet().parameters()])
    for records, weights in trained(2)["clip then unscale"]:
        assert all(r.finite_weights and r.scale == 1024 for r in records)
        assert 0 < (weights - start).norm() <= 4 * 2 * 0.01 / 1024  # momentum 0.5: twice
    assert (trained_by_hand() - start).norm() > 100 * (weights - start).norm()


@pytest.mark.parametrize("step", [1, 3])
def test_a_rank_that_leaves_the_average_out_is_waited_for_not_for_ever(step):
    alone = {"finish_step": precision.leave_out, "infinite": (1, step)}
    with pytest.raises(RankFailed, match="rank 1 returned while rank 0 still waited"):
        launch(precision.train_scaled, 2, **alone)


def test_clipping_is_that_of_one_process_without_a_scale():
    expected = trained_by_hand(clip=0.05, skipped=1)
    for weights in trained(2)["clipped"]:
        near(weights, expected, 1e-6)
    for weights in trained(2)["clipped too early"]:
        assert (weights - expected).abs().max() > 1e-4


def test_both_ranks_skip_when_one_overflows_under_autocast():
    """At 2^21 both overflow; at 2^20 rank 1 does, whose images differ; at 2^19 nobody."""
    (zero, weights), (one, _) = trained(2)["short"]
    assert [record.finite_gradients for record in zero] == [False, True, True, True]
    assert [record.finite_gradients for record in one] == [False, False, True, True]
    for records in (zero, one):
        assert [record.scale for record in records] == [2.0**20, *[2.0**19] * 3]
    assert zero[-1].weights == one[-1].weights and weights.isfinite().all()


def test_ranks_that_leave_out_as_many_averages_differ_and_nobody_waits():
    (zero, first), (one, second) = trained(2)["short, left out"]
    assert zero[-1].weights != one[-1].weights
    assert first.isfinite().all() and second.isfinite().all()


def test_the_table_says_who_met_an_infinity():
    report = Report(2, results=trained(2)["short, look then average"])
    rows = measurements.steps_table(report).rows
    assert rows[0] == [0, "both", "2^20", "2^20", "alike", "finite", "finite"]
    assert rows[1] == [1, "rank 1", "2^20", "2^19", "differ", "broken", "finite"]
    assert rows[2] == [2, "rank 0", "2^19", "2^19", "differ", "broken", "broken"]


@cache
def trained_in_parts_by_hand(ranks, dtype):
    """What `ranks` ranks compute in `dtype` and average in float32, in one process."""
    torch.manual_seed(0)
    model, data = SmallConvNet(), digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))
    for step in range(4):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for mine in order[120 * step : 120 * step + 120].tensor_split(ranks):
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                loss = nll_loss(model(data.images[mine]), data.labels[mine])
            gradients = torch.autograd.grad(1024 * loss, list(model.parameters()))
            for whole, part in zip(total, gradients, strict=True):
                whole += part.float() / ranks
        for parameter, whole in zip(model.parameters(), total, strict=True):
            parameter.grad = whole / 1024
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ddp", ORDERS)
def test_ranks_under_autocast_take_the_steps_written_out(dtype, ddp):
    first, second = trained(2)[f"{dtype}, ddp {ddp}"]
    assert torch.equal(first[1], second[1])
    near(first[1], trained_in_parts_by_hand(2, dtype), 1e-6)
