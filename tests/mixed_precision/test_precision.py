"""What short numbers lose; scaled ranks take the steps of one process, written out here."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn.functional import nll_loss
from torch.nn.utils import clip_grad_norm_

from mgpu_tutorial.lab import RankFailed, launch
from mgpu_tutorial.mixed_precision import precision
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet


def near(x, y, atol):
    torch.testing.assert_close(x, y, rtol=0, atol=atol)


def trained_by_hand(steps=4, clip=1.0):
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
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


# Numbers


def test_tf32_keeps_ten_bits_and_rounds_to_the_nearest_even():
    gap = 2.0**-10
    given = torch.tensor([1 + gap, 1 + gap / 2, 1 + gap * 1.5, 1 + gap * 0.51, -3.0, 0.0])
    expected = [1 + gap, 1.0, 1 + 2 * gap, 1 + gap, -3.0, 0.0]
    assert precision.as_tf32(given).tolist() == expected
    x = torch.randn(1000)
    assert ((precision.as_tf32(x) - x).abs() <= x.abs() * 2.0**-11).all()
    assert torch.equal(precision.as_tf32(precision.as_tf32(x)), precision.as_tf32(x))


# Autocast and the scaler


def test_autocast_casts_products_and_leaves_weights_and_gradients():
    net = SmallConvNet(norm="batch")
    with precision.autocast("cpu", torch.bfloat16):
        seen = precision.observe(net, torch.randn(4, 1, 28, 28))
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


def test_a_scaler_skips_the_infinity_halves_and_grows_again():
    life = precision.life_of_a_scaler(3, 7, init_scale=1024.0, growth_interval=2)
    assert [m.scale_after for m in life] == [1024, 2048, 2048, 1024, 1024, 2048, 2048]
    assert [m.stepped for m in life] == [True, True, True, False, True, True, True]
    assert [m.largest == float("inf") for m in life].index(True) == 3


def test_a_scale_in_float32_changes_no_bit():
    def train_twice(rank, world_size):
        return [
            precision.train_scaled(rank, world_size, init_scale=scale)[1]
            for scale in (1.0, 2.0**16)
        ]

    plain, scaled = launch(train_twice, 1).results[0]
    assert torch.equal(plain, scaled)


# Several ranks


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_scaled_ranks_take_the_steps_of_one_process(world_size):
    results = launch(precision.train_scaled, world_size, verify=True).results
    for records, weights in results:
        near(weights, trained_by_hand(), 1e-6)
        assert [record.scale for record in records] == [1024] * 4
        assert torch.equal(weights, results[0][1]) and records == results[0][0]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("who", [0, 1])
def test_one_infinity_makes_all_ranks_skip(world_size, who):
    results = launch(
        precision.train_scaled, world_size, infinite=(who, 1), verify=True
    ).results
    records, weights = results[0]
    assert [record.scale for record in records] == [1024, 512, 512, 512]
    assert records[0].weights == records[1].weights != records[2].weights
    assert weights.isfinite().all() and all(r[0] == records for r in results)


def test_ranks_that_look_before_they_average_part():
    wrong = {"finish_step": precision.look_then_average, "infinite": (1, 1)}
    (zero, _), (one, _) = launch(precision.train_scaled, 2, **wrong).results
    assert zero[0] == one[0]
    assert zero[1].scale == 2 * one[1].scale and zero[1].weights != one[1].weights
    assert not zero[1].finite and one[1].finite
    assert not one[2].finite  # rank 1 breaks a step later


def test_ranks_that_disagree_are_told_so_on_every_rank():
    wrong = {"finish_step": precision.look_then_average, "infinite": (1, 1)}
    with pytest.raises(
        RankFailed, match="ranks 0 and 1 raised RuntimeError: the loss scales"
    ):
        launch(precision.train_scaled, 2, **wrong, verify=True)

    def compare_other_weights(rank, world_size):
        model = SmallConvNet()
        if rank:
            model.fc2.bias.data[9] += 1e-6  # the last parameter
        precision.check_agreement(model, torch.amp.GradScaler("cpu"))

    with pytest.raises(RankFailed, match="parameters of rank 1 are not those of rank 0"):
        launch(compare_other_weights, 2)


@pytest.mark.parametrize("step", [1, 3])
def test_a_rank_that_leaves_the_average_out_is_waited_for_not_for_ever(step):
    alone = {"finish_step": precision.leave_alone, "infinite": (1, step)}
    with pytest.raises(RankFailed, match="rank 1 returned while rank 0 still waited"):
        launch(precision.train_scaled, 2, **alone)


def test_clipping_is_that_of_one_process_without_a_scale():
    def train_both(rank, world_size):
        def finish_step(model, optimizer, scaler):
            precision.average_then_look(model, optimizer, scaler, clip=0.05)

        _, scaled = precision.train_scaled(rank, world_size, finish_step)
        _, unscaled = precision.train_clipped(rank, world_size, clip=0.05)
        return scaled, unscaled

    expected = trained_by_hand(clip=0.05)
    for found in launch(train_both, 2).results:
        near(found, (expected, expected), 1e-6)


def trained_in_parts_by_hand(ranks, dtype, hook):
    """What `ranks` ranks compute in `dtype` and send as `hook`, in one process."""
    torch.manual_seed(0)
    model, data = SmallConvNet(), digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1))
    for step in range(4):
        total = [torch.zeros_like(p, dtype=hook) for p in model.parameters()]
        for mine in order[120 * step : 120 * step + 120].tensor_split(ranks):
            with torch.autocast("cpu", dtype, enabled=dtype is not torch.float32):
                loss = nll_loss(model(data.images[mine]), data.labels[mine])
            gradients = torch.autograd.grad(1024 * loss, list(model.parameters()))
            for whole, part in zip(total, gradients, strict=True):
                whole += part.to(hook) / ranks
        for parameter, whole in zip(model.parameters(), total, strict=True):
            parameter.grad = whole.float() / 1024
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    ("dtype", "hook", "scale", "nbytes"),
    [
        (torch.float32, torch.float32, 1.0, 4 * 21840),
        (torch.bfloat16, torch.float32, 1.0, 4 * 21840),
        (torch.bfloat16, torch.bfloat16, 1.0, 2 * 21840),
        (torch.float16, torch.float32, 1024.0, 4 * 21840),
    ],
)
def test_ddp_ranks_take_the_steps_written_out(dtype, hook, scale, nbytes):
    settings = {"dtype": dtype, "hook": str(hook).removeprefix("torch."), "scale": scale}
    report = launch(precision.train_with_ddp, 2, **settings, trace=True)
    first, second = report.results
    assert first.fingerprint == second.fingerprint
    near(first.parameters, trained_in_parts_by_hand(2, dtype, hook), 1e-6)
    (inside,) = [e for e in report.events if e.rank == 0 and e.note == "step"]
    sent = [e for e in report.events if e.rank == 0 and e.kind == "collective"]
    assert sum(e.nbytes for e in sent if inside.begin <= e.begin <= inside.end) == nbytes


def test_a_large_scale_overflows_a_float16_hook_only():
    def train_each(rank, world_size):
        return {
            hook: precision.train_with_ddp(rank, world_size, hook=hook, scale=2.0**24).scale
            for hook in ("float32", "float16", "bfloat16")
        }

    after = launch(train_each, 2).results[0]
    assert after["float32"] == after["bfloat16"] == 2.0**24 > after["float16"]
