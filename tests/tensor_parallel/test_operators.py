"""Operators, layers, vocabulary: as plain tensors of all ranks give it."""

from functools import cache

import pytest

from mgpu_tutorial.lab import launch
from mgpu_tutorial.lab.record.intervals import events_of
from mgpu_tutorial.tensor_parallel import product
from tests.tensor_parallel import ranks
from tests.thorough import MESSAGES

OF_ANY_NUMBER = {  # workers with their arguments
    "operators": (ranks.apply_operators,),
    "layers": (ranks.apply_layers,),
    "product": (product.multiply,),
    "vocabulary 61": (ranks.share_a_vocabulary, 61),
}
OF_FOUR = {
    "vocabulary 5": (ranks.share_a_vocabulary, 5),
    "large logits": (ranks.share_a_vocabulary, 9, 1e4),
    "groups": (ranks.train_in_groups,),
    "values": (ranks.start_from_other_values,),
    "copies": (ranks.lose_a_copy,),
    "copies in pairs": (ranks.lose_a_copy, True),
    "pieces": (ranks.take_apart,),
    "dropout": (ranks.draw_often,),
    "dropout in pairs": (ranks.draw_in_pairs,),
}


@cache
def report(world_size):
    workers = OF_ANY_NUMBER | (OF_FOUR if world_size == 4 else {})
    return launch(ranks.run_all, world_size, workers, trace=True)


def facts():
    """What needs four ranks."""
    return report(4).results


@pytest.mark.parametrize("world_size", MESSAGES)
def test_each_operator_and_its_backward(world_size):
    for found in report(world_size).results:
        assert found["operators"] == dict.fromkeys(found["operators"], 0.0)
        assert len(found["operators"]) == 4


@pytest.mark.parametrize("world_size", MESSAGES)
def test_layers_in_pieces_are_the_whole_layer(world_size):
    for found in report(world_size).results:
        assert found["layers"] == {"bias True": 0.0, "bias False": 0.0}


@pytest.mark.parametrize("world_size", MESSAGES)
def test_the_product_of_the_lesson_is_the_product(world_size):
    for found in report(world_size).results:
        assert (found["product"].result == product.X @ product.A @ product.B).all()


@pytest.mark.parametrize("world_size", MESSAGES)
def test_a_vocabulary_that_does_not_divide(world_size):
    for found in report(world_size).results:
        assert max(found["vocabulary 61"]) < 1e-12


def test_the_loss_sends_three_numbers_per_token():
    sent = [e for e in events_of(report(2), "loss") if e.rank == 0]
    assert [(e.op, e.nbytes) for e in sent] == [("all_reduce", 2 * 61 * 8)] * 3


def test_a_rank_may_have_nothing_but_padding():
    for found in facts():
        assert max(found["vocabulary 5"]) < 1e-12


def test_large_logits_do_not_overflow():
    for found in facts():
        assert max(found["large logits"]) < 1e-8  # of a loss of some ten thousand


def test_groups_work_side_by_side():
    assert max(found["groups"] for found in facts()) < 1e-12


def test_all_ranks_begin_with_the_values_of_the_first():
    assert [found["values"] for found in facts()] == [0.0] * 4


def test_one_bit_of_one_copy_is_found_on_every_rank():
    assert [found["copies"] for found in facts()] == [([], ["norm.weight"])] * 4


def test_another_group_has_copies_of_its_own():
    found = [found["copies in pairs"] for found in facts()]
    assert found == [([], [])] * 2 + [([], ["norm.weight"])] * 2


def test_norms_positions_and_the_second_bias_stay_whole():
    for found in facts():
        pieces, still_tied = found["pieces"]
        layers = ["attention.query", "attention.key", "attention.value", "attention.out"]
        expected = ["token.weight"]
        for block in ("blocks.0", "blocks.1"):
            expected += [f"{block}.{layer}.weight" for layer in layers]
            mlp = ["mlp.up.weight", "mlp.up.bias", "mlp.down.weight"]
            expected += [f"{block}.{name}" for name in mlp]
        assert sorted(pieces) == sorted(expected) and still_tied


def test_copies_draw_alike_and_pieces_do_not():
    masks, entries, after = zip(*(found["dropout"] for found in facts()), strict=True)
    for name in ("copy", "next copy"):
        assert len({tuple(mask[name]) for mask in masks}) == 1
    assert len({tuple(mask["piece"]) for mask in masks}) == 4
    assert len({str(draws) for both in entries for draws in both}) == 8
    assert len(set(after)) == 1


def test_a_group_draws_as_if_it_were_alone():
    first, second, *others = (found["dropout in pairs"] for found in facts())
    assert first != second and others == [first, second]


MISTAKES = {
    "kv heads": "ValueError: 4 ranks cannot share 2 key-value heads evenly: take a number",
    "heads": "ValueError: 4 ranks cannot share 6 heads evenly",
    "features": "ValueError: 10 features cannot be cut into 4 equal pieces",
    "rows": "ValueError: 10 features cannot be cut into 4 equal pieces",
    "twice": "ValueError: this model is in pieces already: parallelize it once",
    "other model": "ValueError: rank 1 of the group has other parameters than its rank 0",
    "other table": "ValueError: rank 2 of the group has other parameters than its rank 0",
    "other dtype": "ValueError: rank 3 of the group has other parameters than its rank 0",
    "other batch": "ValueError: rank 2 of the group has another batch than its rank 0",
    "other shape": "ValueError: rank 3 of the group has another batch than its rank 0",
    "token": "IndexError: tokens from 0 to 61, but a vocabulary of 61: no rank has them",
    "negative": "IndexError: tokens from -61 to 0, but a vocabulary of 61: no rank",
    "target": "IndexError: tokens from 0 to 61, but a vocabulary of 61: no rank has them",
    "sequence": "ValueError: a sequence of 10 tokens cannot be cut into 4 equal slices",
}


@cache
def said():
    return launch(ranks.make_every_mistake, 4).results


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_on_every_rank(mistake):
    for found in said():
        assert set(found) == set(MISTAKES)
        assert found[mistake].startswith(MISTAKES[mistake])
