"""The wrappers: equal to torch's DDP and to one process, for every odd kind of module."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets import wrappers
from mgpu_tutorial.ddp_buckets.experiments import WRAPPERS, run_each_setting
from mgpu_tutorial.lab import RankFailed, launch
from tests.ddp_buckets import ranks as workers

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


@pytest.fixture(scope="module")
def runs():
    """What every wrapper gives on 1 to 4 ranks, for each variant; and one process alone."""
    settings = {
        (wrapper.__name__, name): {"wrapper": wrapper} | variant
        for wrapper in WRAPPERS
        for name, variant in VARIANTS.items()
    }
    settings |= {
        (BUCKETED.__name__, n): {"wrapper": BUCKETED, "cap": c} for n, c in CAPS.items()
    }
    settings |= {
        (wrapper.__name__, "norm"): {"wrapper": wrapper, "kind": "norm"}
        for wrapper in WRAPPERS
    }
    found = {
        n: launch(run_each_setting, n, workers.train, settings, timeout=120).results
        for n in (1, 2, 3, 4)
    }
    alone = {name: workers.train(0, 1, None, **variant) for name, variant in VARIANTS.items()}
    return found, alone


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("variant", list(VARIANTS))
@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.__name__)
def test_four_steps_equal_one_process_and_torch(runs, wrapper, variant, world_size):
    found, alone = runs
    of_torch = found[world_size][0][DistributedDataParallel.__name__, variant]
    # bfloat16 rounds to 3 digits: a sum in another order is another number.
    loose = {"rtol": 0.05, "atol": 0.02} if variant == "several dtypes" else {}
    for rank, result in enumerate(found[world_size]):
        mine = result[wrapper.__name__, variant]
        torch.testing.assert_close(mine, of_torch, **loose)
        torch.testing.assert_close(mine, alone[variant], **loose)
        first = found[world_size][0][wrapper.__name__, variant]
        torch.testing.assert_close(mine, first, rtol=0, atol=0, msg=f"rank {rank}")


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("cap", list(CAPS))
def test_any_bucket_size_gives_the_same(runs, cap, world_size):
    found, alone = runs
    for result in found[world_size]:
        torch.testing.assert_close(result[BUCKETED.__name__, cap], alone["plain"])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("wrapper", OURS, ids=lambda wrapper: wrapper.__name__)
def test_parameters_and_buffers_of_a_batch_norm_equal_torch(runs, wrapper, world_size):
    for result in runs[0][world_size]:
        of_torch = result[DistributedDataParallel.__name__, "norm"]
        torch.testing.assert_close(result[wrapper.__name__, "norm"], of_torch)


def test_the_baseline_is_no_constant(runs):
    _, alone = runs
    (gradients, parameters), (_, tied) = alone["plain"], alone["tied"]
    assert all(g.abs().max() > 0 for g in gradients.values())
    assert not torch.equal(parameters["head.weight"], tied["head.weight"])
    assert alone["frozen"][0]["body.1.weight"] is None


FIRST = 4 * (10 + 10 * 48 + 48 + 48 * 48)  # bytes of the head and of one layer


@pytest.mark.parametrize("cap", [1e-6, 0.005, 0.01, FIRST / 2**20, 0.03, 25])
def test_our_buckets_are_those_of_torch(cap):
    settings = {own: {"cap": cap, "own": own} for own in (False, True)}
    for result in launch(run_each_setting, 2, workers.cut_buckets, settings).results:
        assert result[True] == result[False]


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


@pytest.mark.parametrize("wrapper", [wrappers.NaiveDDP, wrappers.FlatDDP, BUCKETED])
def test_a_rank_that_does_not_use_a_parameter_counts_as_zero(wrapper):
    results = launch(workers.use_half, 2, wrapper).results
    assert results == [[[[0.5] * 4], [[1.5] * 4]]] * 2


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


@pytest.mark.parametrize("wrapper", OURS)
def test_a_dtype_that_differs_by_rank_is_refused_on_every_rank(wrapper):
    says = (
        r"ranks 0 and 1 raised ValueError: rank 1 has \('head.weight', \[10, 64\], 'torch.f"
    )
    with pytest.raises(RankFailed, match=says):
        launch(workers.wrap_another_dtype, 2, wrapper, timeout=10)


@pytest.mark.parametrize("wrapper", OURS)
def test_a_module_without_anything_to_train_is_refused(wrapper):
    with pytest.raises(RankFailed, match="no parameter requires a gradient"):
        launch(workers.freeze_everything, 2, wrapper)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_buffers_start_from_rank_0_and_come_from_it_before_each_forward(wrapper):
    results = launch(workers.follow_buffers, 2, wrapper).results
    assert results == [[5.0, 5.5, 5.95], [5.0, 6.5, 6.95]]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_are_views_into_the_buckets(set_to_none):
    assert launch(workers.look_for_views, 2, set_to_none).results == [[True] * 3] * 2


@pytest.mark.parametrize("wrapper", OURS)
def test_a_state_dict_goes_to_the_plain_module_and_back(wrapper):
    assert launch(workers.carry_a_state_dict, 2, wrapper).results == [(True, True, True)] * 2


@pytest.mark.parametrize("cap", [0, -1, float("nan")])
def test_a_bucket_size_must_be_positive(cap):
    with pytest.raises(RankFailed, match="bucket_cap_mb must be positive, got"):
        launch(workers.train, 2, BUCKETED, cap=cap)
