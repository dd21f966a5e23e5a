"""What short numbers lose; scaled ranks take the steps of one process."""

import copy
import json
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from mgpu_tutorial.ddp_buckets.hooks import payload
from mgpu_tutorial.distributed_sgd import average_gradients
from mgpu_tutorial.lab import RankFailed, launch
from mgpu_tutorial.mixed_precision import adversarial, comparison, opt_levels, precision
from mgpu_tutorial.shared.models import SmallConvNet


def near(x, y, atol):
    torch.testing.assert_close(x, y, rtol=0, atol=atol)


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
    (_, plain), (_, scaled) = (
        launch(precision.scaled_steps, 1, init_scale=scale).results[0]
        for scale in (1.0, 2.0**16)
    )
    assert torch.equal(plain, scaled)


def test_pure_bfloat16_lags_behind_and_master_weights_do_not():
    found = {level: opt_levels.opt_level(level) for level in ("O0", "O1", "O2", "O3")}
    fall = {level: found["O0"]["start"] - f["loss"] for level, f in found.items()}
    assert fall["O0"] > 0 and min(fall["O1"], fall["O2"]) > 0.7 * fall["O0"]
    assert fall["O3"] < 0.5 * fall["O0"]
    dtypes = {level: (f["weights"], f["conv1 returns"]) for level, f in found.items()}
    assert dtypes["O1"] == ("float32", "bfloat16") and dtypes["O0"] == ("float32", "float32")
    assert dtypes["O2"] == dtypes["O3"] == ("bfloat16", "bfloat16")
    with pytest.raises(ValueError, match="level must be O0, O1, O2 or O3, got 'O4'"):
        opt_levels.opt_level("O4")


# Several ranks


@pytest.fixture(scope="module")
def alone():
    return launch(precision.scaled_steps, 1).results[0][1]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_scaled_ranks_take_the_steps_of_one_process(alone, world_size):
    results = [w for _, w in launch(precision.scaled_steps, world_size, verify=True).results]
    near(results, [alone] * world_size, 1e-6)
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("who", [0, 1])
def test_one_infinity_makes_all_ranks_skip(world_size, who):
    results = launch(
        precision.scaled_steps, world_size, infinite=(who, 1), verify=True
    ).results
    rows, weights = results[0]
    assert [scale for scale, *_ in rows] == [1024, 512, 512, 512]
    assert rows[0][1] == rows[1][1] != rows[2][1]  # step 1 left the weights as they were
    assert weights.isfinite().all() and all(r[0] == rows for r in results)


def test_ranks_that_look_before_they_average_part():
    wrong = {"finish": precision.look_then_average, "infinite": (1, 1)}
    (zero, _), (one, _) = launch(precision.scaled_steps, 2, **wrong).results
    assert zero[0] == one[0]
    assert zero[1][0] == 2 * one[1][0] and zero[1][1] != one[1][1]
    assert not zero[1][2] and one[1][2] and not one[2][2]  # rank 1 breaks a step later


def test_ranks_that_disagree_are_told_so_on_every_rank():
    wrong = {"finish": precision.look_then_average, "infinite": (1, 1), "verify": True}
    with pytest.raises(
        RankFailed, match="ranks 0 and 1 raised RuntimeError: the loss scales"
    ):
        launch(precision.scaled_steps, 2, **wrong)

    def other_weights(rank, world_size):
        precision.agreed(
            nn.Linear(2, 2) if rank else SmallConvNet(), torch.amp.GradScaler("cpu")
        )

    with pytest.raises(RankFailed, match="parameters of rank 1 are not those of rank 0"):
        launch(other_weights, 2)


def test_a_rank_that_leaves_the_average_out_is_waited_for_not_for_ever():
    for step in (1, 3):
        alone = {"finish": precision.leave_alone, "infinite": (1, step)}
        with pytest.raises(RankFailed, match="rank 1 returned while rank 0 still waited"):
            launch(precision.scaled_steps, 2, **alone)


def test_clipping_scaled_gradients_takes_too_short_steps(alone):
    def moved(finish):
        start = launch(precision.scaled_steps, 2, steps=0).results[0][1]
        return (
            launch(precision.scaled_steps, 2, finish, steps=1).results[0][1] - start
        ).norm()

    assert moved(precision.clip_then_unscale) < moved(precision.average_then_look) / 100


def test_clipping_is_that_of_one_process_without_a_scale():
    def clipped(model, optimizer, scaler):
        precision.average_then_look(model, optimizer, scaler, clip=0.05)

    def plainly(model, optimizer, scaler):
        average_gradients(model)
        clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()

    one = launch(precision.scaled_steps, 1, plainly, init_scale=1.0).results[0][1]
    for _, weights in launch(precision.scaled_steps, 2, clipped).results:
        near(weights, one, 1e-6)


@pytest.mark.parametrize(
    ("settings", "nbytes"),
    [
        ({}, 4 * 21840),
        ({"dtype": torch.bfloat16}, 4 * 21840),
        ({"dtype": torch.bfloat16, "hook": "bfloat16"}, 2 * 21840),
        ({"dtype": torch.float16, "scale": 1024.0}, 4 * 21840),
    ],
)
def test_ddp_ranks_stay_alike_under_autocast_and_hooks(alone, settings, nbytes):
    report = launch(precision.ddp_steps, 2, **settings, trace=True)
    (_, one, _, weights), (_, two, _, _) = report.results
    assert one == two and payload(report, "step") == nbytes
    exact = launch(precision.ddp_steps, 1).results[0][3]
    near(weights, exact, 1e-6 if not settings else 0.01)


def test_a_large_scale_overflows_a_float16_hook_only():
    after = {
        hook: launch(precision.ddp_steps, 2, hook=hook, scale=2.0**24).results[0][2]
        for hook in ("float32", "float16", "bfloat16")
    }
    assert after["float32"] == after["bfloat16"] == 2.0**24 > after["float16"]


# The pair


def test_the_pair_on_n_ranks_is_the_pair_on_one():
    one, samples = launch(adversarial.train_pair, 1, keep=(5,), double=True).results[0]
    for world_size in (2, 3):
        results = launch(adversarial.train_pair, world_size, keep=(5,), double=True).results
        for weights, seen in results:
            near(weights, one, 1e-13)
            near(seen[5], samples[5], 1e-6)
        assert torch.equal(results[0][0], results[1][0])
    single = launch(adversarial.train_pair, 1).results[0][0]
    near(launch(adversarial.train_pair, 2).results[1][0], single, 1e-5)


def test_both_players_learn_and_neither_from_the_others_loss():
    torch.manual_seed(0)
    forger = adversarial.Player(adversarial.generator(), 1e-3, 1.0)
    judge = adversarial.Player(adversarial.discriminator(), 1e-3, 1.0)
    before = copy.deepcopy((forger.net.state_dict(), judge.net.state_dict()))
    real, fake = adversarial.real_images()[:8], forger.net(torch.randn(8, 16))
    loss = adversarial.judge_loss(judge.net(real), judge.net(fake.detach()))
    judge.learn(loss, lambda net: None)
    assert all(p.grad is None for p in forger.net.parameters())
    after = judge.net.state_dict()
    assert all(not torch.equal(after[k], v) for k, v in before[1].items())
    middle = copy.deepcopy(after)
    forger.learn(adversarial.forger_loss(judge.net(fake)), lambda net: None)
    assert all(torch.equal(judge.net.state_dict()[k], v) for k, v in middle.items())
    changed = forger.net.state_dict()
    assert all(not torch.equal(changed[k], v) for k, v in before[0].items())


def test_the_pair_trains_under_autocast_with_two_scalers():
    short = {"dtype": torch.float16, "scale": 1024.0}
    (one, _), (two, _) = launch(adversarial.train_pair, 2, **short).results
    assert torch.equal(one, two) and one.isfinite().all()


def test_real_images_lie_between_0_and_1():
    images = adversarial.real_images()
    assert images.shape[1] == 784 and images.min() >= 0 and 0.9 < images.max() <= 1


def test_two_wrapped_modules_stay_alike_and_need_detach():
    (forger, judge, sent), other = launch(adversarial.wrapped_pair, 2).results
    assert (forger, judge, sent) == other
    with pytest.raises(RankFailed, match="backward through the graph a second time"):
        launch(adversarial.wrapped_pair, 2, detach=False)
    silent = launch(adversarial.wrapped_pair, 2, detach=False, retain=True).results
    assert silent[0][0] != silent[1][0] and silent[0][1] == silent[1][1]
    plain = launch(adversarial.wrapped_pair, 2, unwrap=False).results[0]
    assert plain[:2] == (forger, judge)  # the same training, with twice the traffic
    assert plain[2]["judge"] == 2 * sent["judge"] and plain[2]["forger"] == sent["forger"]


# The comparison


TINY = comparison.Scale({"mobilenet_v2": 4}, side=32, iterations=1)


@pytest.mark.parametrize("name", comparison.WAYS)
def test_every_way_is_measured(name):
    way = comparison.WAYS[name]
    found = comparison.row("mobilenet_v2", way, TINY, gpus=0, timeout=100)
    assert found["seconds"] > 0 and found["devices"] == 1 + way.several
    assert found["processes"] == (2 if way.processes else 1)
    assert len(found["memory"]) == found["devices"]
    weights = [held["parameters"] for held in found["memory"]]
    assert len(set(weights)) == 1  # each device holds the whole network
    state = [held.get("optimizer state", 0) for held in found["memory"]]
    one_process = way.several and not way.processes
    assert (0 in state) == one_process and state[0] == found["memory"][0]["gradients"]


def test_all_ways_train_the_same_network():
    losses = {}
    for name in ("one device", "DDP"):
        way, ranks = comparison.WAYS[name], 2 if name == "DDP" else 1
        found = launch(
            comparison.measure, ranks, "mobilenet_v2", way, TINY, ranks, "cpu"
        ).results
        losses[name] = sum(r["loss"] for r in found) / ranks
    assert abs(losses["DDP"] - losses["one device"]) < 1.0  # BatchNorm sees half the batch


def test_rows_for_several_gpus_are_not_guessed_on_one():
    for name in ("DataParallel", "DDP", "DDP + autocast", "DDP + compression hook"):
        way = comparison.WAYS[name]
        assert comparison.row("resnet101", way, TINY, gpus=1) == "not measured"
    rows = {"one device": {"seconds": 2.0, "memory": [{"parameters": 4}], "peaks": []}}
    rows["one device"]["processes"] = 1
    result = {"device": "a card", "rows": {"net": rows | {"DDP": "not measured"}}}
    assert comparison.table(result, "net").rows[1] == ["DDP", *["not measured"] * 4]
    drawing = comparison.chart(result)
    assert "not measured" in drawing.text and "DataParallel: 20.4" in drawing.text


def test_the_stored_comparison_is_whole_and_names_no_process():
    result = comparison.stored("cpu")
    assert set(result["rows"]) == {"resnet101", "mobilenet_v2"}
    for rows in result["rows"].values():
        assert list(rows) == list(comparison.WAYS)
    assert "pid" not in json.dumps(result) and set(result["versions"]) >= {"torch"}
    assert comparison.stored("abacus") is None


def test_a_missing_comparison_says_how_to_make_it(monkeypatch, tmp_path):
    monkeypatch.setattr(comparison, "STORED", tmp_path / "comparison.json")
    with pytest.raises(FileNotFoundError, match="comparison.py --save"):
        comparison.stored()
