"""A whole model in pieces: what is cut, what stays whole, groups, and what is refused."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.tensor_parallel.block import (
    parallelize,
    parallelize_with_sequence,
    sum_replicated_gradients,
)
from mgpu_tutorial.tensor_parallel.copies import copies_that_differ, own_draws, replicated
from mgpu_tutorial.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
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
    model = new_model(tied=True)
    whole = ["position.weight", "norm.weight", "norm.bias"]
    for block in ("blocks.0", "blocks.1"):
        for norm in ("attention_norm", "mlp_norm"):
            whole += [f"{block}.{norm}.weight", f"{block}.{norm}.bias"]
        whole += [f"{block}.mlp.down.bias"]
    for values, found, tied in ranks(4, cut_other_values).results:
        assert largest_difference(values, dict(model.named_parameters())) == 0
        assert sorted(found) == sorted(whole) and tied


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


def change_a_copy(rank, world_size, in_pairs):
    """One bit of one copy on the last rank, which may be in a group of two."""
    group = pair_of_mine() if in_pairs else None
    model = parallelize(new_model(), group)
    same = copies_that_differ(model, group)
    if rank == world_size - 1:
        with torch.no_grad():
            model.norm.weight[3] += 1e-7
    return same, copies_that_differ(model, group)


@pytest.mark.parametrize("in_pairs", [False, True])
def test_one_bit_of_one_copy_is_found_in_its_group(ranks, in_pairs):
    seen, unseen = ([], ["norm.weight"]), ([], [])
    expected = [unseen, unseen, seen, seen] if in_pairs else [seen] * 4
    assert ranks(4, change_a_copy, in_pairs).results == expected


def draw_often(rank, world_size, in_pairs):
    """Numbers drawn in common, twice by each rank for itself, and in common again."""
    group = pair_of_mine() if in_pairs else None
    torch.manual_seed(1)
    drawn = [torch.rand(8).tolist()]
    for _ in range(2):
        with own_draws(group):
            drawn.append(torch.rand(8).tolist())
    return [*drawn, torch.rand(8).tolist()]


@pytest.mark.parametrize("in_pairs", [False, True])
def test_copies_draw_alike_and_pieces_do_not(ranks, in_pairs):
    results = ranks(4, draw_often, in_pairs).results
    before, first, second, after = zip(*results, strict=True)
    assert all(drawn == before[0] for drawn in before)
    assert all(drawn == after[0] for drawn in after) and after[0] != before[0]
    group = 2 if in_pairs else 4  # another group draws as if it were alone
    assert len({str(drawn) for drawn in first + second}) == 2 * group
    assert first == first[:group] * (4 // group)


def cut(*dtype, **sizes):
    return parallelize(new_model(*dtype, **sizes))


REFUSED = {  # what four ranks say, and of what
    "ValueError: 4 ranks cannot share 2 key-value heads evenly": lambda _: cut(kv_heads=2),
    "ValueError: 4 ranks cannot share 6 heads evenly": lambda _: cut(heads=6, kv_heads=6),
    "ValueError: 10 features cannot be cut into 4": lambda _: ColumnParallelLinear(
        nn.Linear(4, 10)
    ),
    "ValueError: 14 features cannot be cut into 4": lambda _: RowParallelLinear(
        nn.Linear(14, 4)
    ),
    "ValueError: this model is in pieces already": lambda _: parallelize(cut()),
    "ValueError: rank 1 has other parameters than": lambda rank: cut(depth=2 + (rank == 1)),
    "ValueError: rank 2 has other parameters than": lambda rank: cut(tied=rank == 2),
    "ValueError: rank 3 has other parameters than": lambda rank: cut(
        torch.float64 if rank == 3 else torch.float32
    ),
    "ValueError: rank 2 has other tokens in its batch": lambda rank: cut()(
        new_batch(step=rank // 2)[0]
    ),
    "ValueError: rank 3 has other tokens in its batch": lambda rank: cut()(
        new_batch(0, length=12 + 4 * (rank == 3))[0]
    ),
    "IndexError: tokens from -60 to 0, but a vocabulary of 61": lambda _: cut()(
        -new_batch(0)[0]
    ),
    "IndexError: tokens from 9 to 69, but a vocabulary of 61": lambda _: (
        parallel_cross_entropy(torch.zeros(4, 12, 16), new_batch(0)[1] + 9, 61)
    ),
    "ValueError: a sequence of 10 tokens cannot be cut into 4": lambda _: (
        parallelize_with_sequence(new_model())(new_batch(0, length=10)[0])
    ),
}


def refusals(rank, world_size, misuses):
    """What each misuse raises on this rank, one after the other."""
    said = []
    for misuse in misuses:
        try:
            misuse(rank)
        except (ValueError, IndexError) as error:
            said.append(f"{type(error).__name__}: {error}")
    return said


def test_a_misuse_is_named_on_every_rank(ranks):
    for said in ranks(4, refusals, list(REFUSED.values())).results:
        for expected, found in zip(REFUSED, said, strict=True):
            assert found.startswith(expected)


def see_two_batches(rank, world_size):
    """The first batch is the same on both ranks, the second one is not."""
    model = parallelize(new_model())
    model(new_batch(0)[0])
    return model(new_batch(1 + rank)[0]).shape


def test_only_the_first_batch_is_compared(ranks):
    assert ranks(2, see_two_batches).results == [torch.Size([4, 12, 31])] * 2
