"""A whole model in pieces: what is cut, what stays whole, groups, and what is refused."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.tensor_parallel.block import (
    copies_that_differ,
    own_draws,
    parallelize,
    parallelize_with_sequence,
    replicated,
    sum_replicated_gradients,
)
from mgpu_tutorial.tensor_parallel.training import (
    flat_cross_entropy,
    new_batch,
    new_model,
    whole_gradients,
    whole_values,
)
from mgpu_tutorial.tensor_parallel.vocabulary import parallel_cross_entropy


def pair_of_mine():
    """Of four ranks the first two are a group, and the last two."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).get_group("tp")


def cut_other_values(rank, world_size):
    """Each rank draws values of its own; the whole ones, which are replicated, is it tied?"""
    model = new_model(tied=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += rank
    parallelize(model)
    tied = model.head.weight is model.token.weight
    return whole_values(model), list(replicated(model)), tied


def test_all_ranks_have_pieces_of_what_the_first_one_had(ranks):
    parameters = dict(new_model(tied=True).named_parameters())
    whole = [n for n in parameters if "norm" in n or "position" in n or "down.bias" in n]
    for values, found, tied in ranks(4, cut_other_values).results:
        assert largest_difference(values, parameters) == 0
        assert found == whole and tied


def train_in_pairs(rank, world_size, cut):
    """Each pair has a model and a batch of its own: its loss and its whole gradients."""
    group = pair_of_mine()
    model = cut(new_model(torch.float64, depth=1 + rank // 2), group)
    tokens, targets = new_batch(step=rank // 2)
    loss = parallel_cross_entropy(model(tokens), targets, 61, group)
    loss.backward()
    if cut is parallelize_with_sequence:
        sum_replicated_gradients(model, group)
    return loss.detach(), whole_gradients(model)


@pytest.mark.parametrize("cut", [parallelize, parallelize_with_sequence])
def test_groups_work_side_by_side(ranks, cut):
    for rank, found in enumerate(ranks(4, train_in_pairs, cut).results):
        model = new_model(torch.float64, depth=1 + rank // 2)
        tokens, targets = new_batch(step=rank // 2)
        loss = flat_cross_entropy(model(tokens), targets)
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        assert largest_difference(found, (loss, gradients)) < 1e-12


def change_a_copy(rank, world_size):
    """One bit of one copy on the last rank: which copies differ before, and after?"""
    group = pair_of_mine()
    model = parallelize(new_model(), group)
    same = copies_that_differ(model, group)
    if rank == world_size - 1:
        with torch.no_grad():
            model.norm.weight[3] += 1e-7
    return same, copies_that_differ(model, group)


def test_one_bit_of_one_copy_is_found_in_its_group(ranks):
    seen, unseen = ([], ["norm.weight"]), ([], [])
    assert ranks(4, change_a_copy).results == [unseen, unseen, seen, seen]


def draw_often(rank, world_size):
    """Numbers drawn in common, twice by each rank for itself, and in common again."""
    group = pair_of_mine()
    torch.manual_seed(1)
    drawn = [torch.rand(8).tolist()]
    for _ in range(2):
        with own_draws(group):
            drawn.append(torch.rand(8).tolist())
    return [*drawn, torch.rand(8).tolist()]


def test_copies_draw_alike_and_pieces_do_not(ranks):
    results = ranks(4, draw_often).results
    before, first, second, after = zip(*results, strict=True)
    assert before == (before[0],) * 4 and after == (after[0],) * 4 and after[0] != before[0]
    assert len({str(drawn) for drawn in first + second}) == 4
    assert first[:2] == first[2:]  # another group draws as if it were alone


def cut(*dtype, **sizes):
    return parallelize(new_model(*dtype, **sizes))


MISUSES = {  # by what is said of them
    "4 ranks cannot share 2 key-value heads": lambda rank, _: cut(kv_heads=2),
    "this model is in pieces already": lambda rank, _: parallelize(cut()),
    "rank 1 has other parameters": lambda rank, _: cut(depth=2 + (rank == 1)),
    "rank 2 has other tokens in its batch": lambda rank, _: cut()(new_batch(rank // 2)[0]),
    "tokens from 9 to 69, but": lambda rank, _: parallel_cross_entropy(
        torch.zeros(4, 12, 16), new_batch(0)[1] + 9, 61
    ),
    "a sequence of 10 tokens cannot be cut into 4": lambda rank, _: parallelize_with_sequence(
        new_model()
    )(new_batch(0, length=10)[0]),
}


@pytest.mark.parametrize("says", MISUSES)
def test_a_misuse_is_named_on_every_rank(ranks, says):
    with pytest.raises(RankFailed, match=f"ranks 0, 1, 2 and 3 (.|\\n)*Error: .*{says}"):
        ranks(4, MISUSES[says])
