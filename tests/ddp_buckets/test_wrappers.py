"""The wrappers: equal to torch's DDP and to one process, for every odd kind of module."""

from functools import cache

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets import wrappers
from mgpu_tutorial.ddp_buckets.experiments import run_each_setting
from mgpu_tutorial.ddp_buckets.wrappers import WRAPPERS
from mgpu_tutorial.lab import RankFailed, launch
from tests.ddp_buckets import ranks as workers
from tests.thorough import TRAINED, again

OURS = WRAPPERS[:4]
BUCKETED = wrappers.BucketedDDP
VARIANTS = {  # name: (kind of module, further settings)
    "plain": {"kind": "plain"},
    "frozen": {"kind": "frozen"},
    "tied": {"kind": "tied"},
    "several dtypes": {"kind": "mixed"},
    "gradients kept": {"kind": "plain", "set_to_none": False},
    "accumulated": {"kind": "plain", "micro": 2},
    "accumulated and kept": {"kind": "tied", "micro": 2, "set_to_none": False},
}
CAPS = {"one bucket": 25.0, "a bucket a parameter": 1e-6, "half a weight": 0.008}


WORLD_SIZES = [again(1), *TRAINED]


@cache
def found(world_size):
    """What every wrapper gives on each rank, by its name and the variant's."""
    variants = VARIANTS | {"norm": {"kind": "norm"}}
    settings = {
        (wrapper.__name__, name): {"wrapper": wrapper} | variants[name]
        for wrapper in WRAPPERS
        for name in variants
    }
    settings |= {
        (BUCKETED.__name__, n): {"wrapper": BUCKETED, "cap": c} for n, c in CAPS.items()
    }
    arguments = workers.train, settings
    return launch(run_each_setting, world_size, *arguments, timeout=120).results


@cache
def alone(variant):
    """What one process without a wrapper gives."""
    return workers.train(0, 1, None, **VARIANTS[variant])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("wrapper", OURS, ids=lambda wrapper: wrapper.__name__)
def test_three_steps_equal_one_process_and_torch(wrapper, variant, world_size):
    first = found(world_size)[0]
    of_torch = first[DistributedDataParallel.__name__, variant]
    # bfloat16 rounds to 3 digits: a sum in another order is another number.
    loose = {"rtol": 0.05, "atol": 0.02} if variant == "several dtypes" else {}
    for rank, result in enumerate(found(world_size)):
        mine = result[wrapper.__name__, variant]
        torch.testing.assert_close(mine, of_torch, **loose)
        torch.testing.assert_close(mine, alone(variant), **loose)
        of_first = first[wrapper.__name__, variant]
        torch.testing.assert_close(mine, of_first, rtol=0, atol=0, msg=f"rank {rank}")


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("cap", list(CAPS))
def test_any_bucket_size_gives_the_same(cap, world_size):
    for result in found(world_size):
        torch.testing.assert_close(result[BUCKETED.__name__, cap], alone("plain"))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("wrapper", OURS, ids=lambda wrapper: wrapper.__name__)
def test_parameters_and_buffers_of_a_batch_norm_equal_torch(wrapper, world_size):
    for result in found(world_size):
        of_torch = result[DistributedDataParallel.__name__, "norm"]
        torch.testing.assert_close(result[wrapper.__name__, "norm"], of_torch)


def test_the_baseline_is_no_constant():
    (gradients, parameters), (_, tied) = alone("plain"), alone("tied")
    assert all(g.abs().max() > 0 for g in gradients.values())
    assert not torch.equal(parameters["head.weight"], tied["head.weight"])
    assert alone("frozen")[0]["body.1.weight"] is None


FIRST = 4 * (10 + 10 * 48 + 48 + 48 * 48)  # bytes of the head and of one layer
CUTS = [1e-6, 0.005, 0.01, FIRST / 2**20, 0.03, 25]


def test_our_buckets_are_those_of_torch():
    settings = {(cap, own): {"cap": cap, "own": own} for cap in CUTS for own in (False, True)}
    for result in launch(run_each_setting, 2, workers.cut_buckets, settings).results:
        for cap in CUTS:
            assert result[cap, True] == result[cap, False], cap
        assert len(result[1e-6, True]) == 16 and len(result[25, True]) == 1


def test_a_bucket_is_closed_once_it_holds_its_size():
    a, b, c = (torch.nn.Parameter(torch.tensor([value])) for value in (1.0, 2.0, 3.0))
    assert wrappers.into_buckets([a, b, c], cap=8) == [[a, b], [c]]
    assert wrappers.into_buckets([a, b, c], cap=7) == [[a, b], [c]]
    assert wrappers.into_buckets([a, b, c], cap=9) == [[a, b, c]]
    x, y = (torch.nn.Parameter(torch.tensor([value]).double()) for value in (4.0, 5.0))
    assert wrappers.into_buckets([a, x, b, y, c], cap=8) == [[x], [a, b], [y], [c]]


def test_rank_0_decides_on_the_order_of_the_buckets():
    (first, gradients), (second, others) = launch(workers.use_another_order, 2).results
    assert first == second and first[0].startswith("b.")
    torch.testing.assert_close(gradients, others, rtol=0, atol=0)


def test_a_rank_that_does_not_use_a_parameter_counts_as_zero():
    settings = {w: {"wrapper": w} for w in (wrappers.NaiveDDP, wrappers.FlatDDP, BUCKETED)}
    for found in launch(run_each_setting, 2, workers.use_half, settings).results:
        assert found == {wrapper: [[[0.5] * 4], [[1.5] * 4]] for wrapper in settings}


def test_overlapped_refuses_a_parameter_without_gradient():
    with pytest.raises(
        RankFailed, match="rank 1 raised RuntimeError: no gradient came for b"
    ):
        launch(workers.use_half, 2, wrappers.OverlappedDDP, timeout=10)


@pytest.mark.parametrize("wrapper", [wrappers.OverlappedDDP, BUCKETED])
def test_a_second_backward_without_finish_is_refused(wrapper):
    with pytest.raises(RankFailed, match=r"gradient of \S+ became ready twice: call finish"):
        launch(workers.go_back_twice, 2, wrapper, timeout=10)


def test_a_forward_past_the_wrapper_averages_nothing():
    assert launch(workers.go_past_the_wrapper, 2).results == [1.0, 2.0]


def test_modules_that_no_rank_should_train_are_refused_on_every_rank():
    settings = {
        (wrapper, worker): {"wrapper": wrapper, "worker": worker}
        for wrapper in OURS
        for worker in (workers.wrap_another_dtype, workers.freeze_everything)
    }
    says = {
        workers.wrap_another_dtype: "rank 1 has ('head.weight', [10, 64], 'torch.float64') "
        "where rank 0 has ('head.weight', [10, 64], 'torch.float32'): build the same",
        workers.freeze_everything: "no parameter requires a gradient",
    }
    for refused in launch(run_each_setting, 2, workers.tell_refusal, settings).results:
        for wrapper, worker in settings:
            assert refused[wrapper, worker].startswith(says[worker]), wrapper


def test_buffers_come_from_rank_0_after_a_forward_that_was_averaged_and_no_other():
    # A running mean m becomes 0.9 m + 0.1 x, with x = 10 on rank 0 and 20 on rank 1.
    kinds = ["averaged", "no_sync", "no_sync", "averaged", "averaged", "no_grad", "averaged"]
    settings = {w: {"wrapper": w, "forwards": kinds} for w in WRAPPERS}
    first, second = launch(run_each_setting, 2, workers.follow_buffers, settings).results
    alone = [5.0, 5.5, 5.95, 6.355, 6.7195, 7.0475, 7.3428, 7.6085]
    others = [
        5.0,  # rank 0's
        6.5,  # 0.9 · 5.0 + 2, its own
        6.95,  # 0.9 · 5.5 + 2: the forward before was averaged, so rank 0 sent its 5.5
        8.255,  # 0.9 · 6.95 + 2: after a forward under no_sync nothing is sent,
        9.4295,  # 0.9 · 8.255 + 2: even where this one is averaged
        8.0475,  # 0.9 · 6.7195 + 2: and now rank 0 sent
        8.3428,  # 0.9 · 7.0475 + 2: so it did before a forward without gradients
        9.5085,  # 0.9 · 8.3428 + 2: but not after it
    ]
    for wrapper in WRAPPERS:
        torch.testing.assert_close(first[wrapper], alone, rtol=0, atol=2e-4)
        torch.testing.assert_close(second[wrapper], others, rtol=0, atol=2e-4)


def test_two_forwards_may_come_before_one_backward():
    settings = {w.__name__: {"wrapper": w} for w in WRAPPERS}
    mine, theirs = launch(run_each_setting, 2, workers.go_forward_twice, settings).results
    for name in settings:
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=0, msg=name)


def test_gradients_are_views_into_the_buckets():
    settings = {flag: {"set_to_none": flag} for flag in (True, False)}
    results = launch(run_each_setting, 2, workers.look_for_views, settings).results
    assert results == [{True: [True] * 3, False: [True] * 3}] * 2


def test_a_state_dict_goes_to_the_plain_module_and_back():
    settings = {wrapper: {"wrapper": wrapper} for wrapper in OURS}
    for found in launch(run_each_setting, 2, workers.carry_a_state_dict, settings).results:
        assert found == dict.fromkeys(OURS, (True, True, True))


def test_a_bucket_size_must_be_positive():
    settings = {
        cap: {"worker": workers.train, "wrapper": BUCKETED, "cap": cap} for cap in (0, -1)
    }
    settings["nan"] = settings[0] | {"cap": float("nan")}
    for refused in launch(run_each_setting, 2, workers.tell_refusal, settings).results:
        assert refused == {
            name: f"bucket_cap_mb must be positive, got {name}" for name in settings
        }
