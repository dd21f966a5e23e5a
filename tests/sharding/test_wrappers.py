"""Sharded training is the training of one process, and holds what it says."""

from functools import cache

import pytest
import torch

from mgpu_tutorial.lab import launch
from tests.sharding import ranks
from tests.thorough import again

IN_FLOAT32 = "sgd, float32"
FOUR = [kind for kind in ranks.KINDS if kind != IN_FLOAT32]
# The second step knows the moments of the first; each wrapper as it is takes one more.
STEPS = {way: 3 if way in ranks.PLAIN else 2 for way in ranks.WAYS}


@cache
def reference():
    """One process; in one like those of the ranks, as other threads may round otherwise."""
    parts = {kind: 2 if kind == IN_FLOAT32 else 1 for kind in ranks.KINDS}
    return launch(ranks.by_hand, 1, parts, 3, timeout=90).results[0]


@cache
def distances(world_size, kind):
    """How far any rank ends from one process, by way."""
    what = kind, reference()[kind], STEPS
    found = launch(ranks.train_in_every_way, world_size, *what, timeout=90).results
    return {way: max(result[way] for result in found) for way in STEPS}


@pytest.mark.parametrize("way", ranks.WAYS)
@pytest.mark.parametrize(
    ("world_size", "kind"),
    [(2, kind) for kind in FOUR[:2]]
    + [again(2, kind) for kind in FOUR[2:]]
    + [again(n, kind) for n in (1, 3, 4) for kind in FOUR[:2]],
)
def test_steps_are_those_of_one_process(world_size, kind, way):
    # float64 on numbers below 10: a rounding of 1e-15, times what the steps make of it
    assert distances(world_size, kind)[way] < 1e-12


@pytest.mark.parametrize("way", ranks.WAYS)
def test_two_ranks_in_float32_are_equal_to_the_bit(way):
    assert distances(2, IN_FLOAT32)[way] == 0


@cache
def facts():
    """What one launch of two ranks says of memory, dtypes and values."""
    workers = {
        "memory": (ranks.look_into_a_sharded_model,),
        "kept": (ranks.what_autograd_keeps,),
        "bfloat16": (ranks.train_in_bfloat16,),
        "values": (ranks.set_and_get,),
        "sum": (ranks.add_up,),
        "short blocks": (ranks.compute_blocks_in_bfloat16,),
        "closure": (ranks.step_with_a_closure,),
        "parcels": (ranks.send_in_parcels,),
    }
    return launch(ranks.run_all, 2, workers).results


def test_a_rank_keeps_its_shards_and_nothing_else():
    for found in facts():
        memory = found["memory"]
        parameters = 185 + 320 + 2 * (4 * 5 + 4 * 25 + 100 + 20 + 100 + 5) + 10
        assert memory["before"] == 8 * parameters
        assert memory["parameters outside"] == 0
        assert sorted(memory["padding"]) == [1, 1, 1]
        assert memory["shards"] == 8 * (parameters + 3) // 2


def test_the_next_unit_is_on_its_way_from_the_second_forward_on():
    for found in facts():
        assert found["memory"]["prefetched"] == ((False, False), (True, True))
        assert found["memory"]["after the root"] == [True, False]  # the next one only
        assert not any(found["memory"]["gathered after forward"])


def test_autograd_keeps_no_gathered_parameter():
    assert [found["kept"] for found in facts()] == [(True, [])] * 2


def test_a_compute_dtype_leaves_the_master_weights_alone():
    for found in facts():
        seen, gradients, masters, off = found["bfloat16"]
        short = torch.bfloat16
        assert seen == {"weight": short, "input": short, "output": torch.float32}
        assert gradients == masters == {torch.float32}
        assert 0 < off < 0.05  # eight binary digits, and not twice or half


def test_a_block_that_computes_in_short_takes_and_gives_long_numbers():
    for found in facts():
        assert found["short blocks"] == [torch.bfloat16, torch.bfloat16, torch.float32]


def test_whole_values_go_in_and_come_out():
    for found in facts():
        equal, said = found["values"]
        assert equal and said.startswith("ValueError: missing or unknown: ")


def test_two_backwards_before_a_step_add_up():
    for found in facts():
        assert max(found["sum"]) < 1e-12


def test_parameters_of_one_owner_and_dtype_travel_together():
    # the mean of 1 and 2 is 1.5 times the number of the parameter, and the rate is 1
    means = {"large": [-1.5], "small": [-3.0], "turned": [-4.5], "last": [0.0]}
    means |= {"short": [-7.5], "frozen": [0.0]}
    # rank 0 owns the large one alone; rank 1 those that are left, of two dtypes
    assert [found["parcels"] for found in facts()] == [(means, 3)] * 2


def test_a_closure_is_called_with_gradients():
    assert [found["closure"] for found in facts()] == [(9.0, 0.0)] * 2


MISTAKES = {
    "other modules": "ValueError: rank 1 has ",
    "inside": "ValueError: there is a {} inside at '1': wrap a module once",
    "again": "ValueError: there is a {} inside: wrap a module once",
    "inside DDP": "ValueError: a sharded module averages its gradients by itself",
    "frozen": "ValueError: no parameter requires a gradient",
}
MISTAKES = {
    f"{name}: {mistake}": said.format(name)
    for name in ("ShardedGradients", "ShardedModel")
    for mistake, said in MISTAKES.items()
} | {
    "stranger": "ValueError: units must be submodules",
    "other units": "ValueError: rank 1 has other units",
    "other dtype": "ValueError: rank 1 has other units, or another compute_dtype",
    "no class": "TypeError: optimizer_class must be a class of torch.optim, got 'Adam'",
    "other state": "ValueError: the state is of groups of [1] parameters, ours have [28]",
    "model: backward twice": "RuntimeError: a second backward through the same forward",
    "gradients: backward twice": "RuntimeError: a gradient became ready twice",
    "gradients: replaced": "RuntimeError: a parameter of shape [5] has got another tensor",
    "model: replaced": "RuntimeError: weight of LayerNorm was set after",
    "model: changed": "RuntimeError: a parameter of SmallTransformer was changed",
    "model: changed in training": "RuntimeError: ",  # PyTorch itself forbids it
}


@cache
def said():
    return launch(ranks.make_every_mistake, 2).results


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_on_every_rank(mistake):
    for found in said():
        assert set(found) == set(MISTAKES)
        assert found[mistake].startswith(MISTAKES[mistake])
