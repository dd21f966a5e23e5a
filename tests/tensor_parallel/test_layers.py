"""Operators, layers and the block on several ranks: as one process gives it."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import mse_loss

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.tensor_parallel import figures
from mgpu_tutorial.tensor_parallel.block import (
    PLAN,
    Block,
    copies,
    copies_that_differ,
    gradients_of,
    new_block,
    parallelize,
    whole_of,
)
from mgpu_tutorial.tensor_parallel.layers import shard


def draw(seed, *shape):
    """Whole numbers as float64: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).double()


@given(length=some.integers(1, 12), ranks=some.integers(1, 5), dim=some.integers(0, 1))
def test_shards_are_equal_and_make_the_whole(length, ranks, dim):
    whole = nn.Parameter(draw(0, *[(length, 2), (2, length)][dim]))
    parts = []
    for rank in range(ranks):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.distributed.get_world_size", lambda _: ranks)
            patch.setattr("torch.distributed.get_rank", lambda _, r=rank: r)
            if length % ranks:
                with pytest.raises(ValueError, match=f"{length} features cannot be cut into"):
                    shard(whole, dim)
                return
            parts.append(shard(whole, dim))
    assert torch.equal(torch.cat(parts, dim), whole)
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in parts)


# The block


def attention_by_hand(attention, x):
    """Head by head and token by token, with loops."""
    width, per_head = x.shape[-1], attention.per_head
    mixed = torch.zeros_like(x)
    for head in range(width // per_head):
        rows = slice(3 * per_head * head, 3 * per_head * (head + 1))
        qkv = x @ attention.qkv.weight[rows].T + attention.qkv.bias[rows]
        q, k, v = qkv.split(per_head, -1)
        for place in range(x.shape[1]):
            before = slice(0, place + 1)
            scores = (k[:, before] @ q[:, place, :, None])[..., 0] / per_head**0.5
            columns = slice(per_head * head, per_head * (head + 1))
            weights = scores.softmax(-1)[..., None]
            mixed[:, place, columns] = (weights * v[:, before]).sum(1)
    return mixed @ attention.out.weight.T + attention.out.bias


def test_attention_looks_back_head_by_head():
    block = Block(width=12, heads=3).double()
    x = torch.randn(2, 5, 12).double()
    assert (
        largest_difference(block.attention(x), attention_by_hand(block.attention, x)) < 1e-14
    )


def gradients_alone():
    """The gradients of a step in one process, written out."""
    torch.manual_seed(0)
    block, generator = Block(48, 12).double(), torch.Generator().manual_seed(0)
    x, target = torch.randn(2, 4, 12, 48, generator=generator, dtype=torch.float64)
    mse_loss(block(x), target).backward()
    return {n: p.grad for n, p in block.named_parameters()}


def pair_of_mine():
    """Of four ranks the first two are a group, and the last two."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")).get_group("tp")


def take_gradients(rank, world_size, in_pairs):
    block = parallelize(new_block(), PLAN, pair_of_mine() if in_pairs else None)
    gradients_of(block)
    return {n: whole_of(p.grad, p) for n, p in block.named_parameters()}


@pytest.mark.parametrize(("world_size", "in_pairs"), [(1, False), (3, False), (4, True)])
def test_gradients_are_those_of_one_process(ranks, world_size, in_pairs):
    report = ranks(world_size, take_gradients, in_pairs)
    assert largest_difference(report.results, [gradients_alone()] * world_size) < 1e-14


def change_a_copy(rank, world_size):
    """One bit of one copy on the last rank: which copies differ before, and after?"""
    group = pair_of_mine()
    block = parallelize(new_block(), PLAN, group)
    same = copies_that_differ(block, group)
    if rank == world_size - 1:
        with torch.no_grad():
            block.mlp_norm.weight[3] += 1e-15
    return same, copies_that_differ(block, group), list(copies(block))


def test_one_bit_of_one_copy_is_found_in_its_group(ranks):
    norms = [f"{n}_norm.{part}" for n in ("attention", "mlp") for part in ("weight", "bias")]
    for rank, (before, after, names) in enumerate(ranks(4, change_a_copy).results):
        assert before == [] and after == (["mlp_norm.weight"] if rank > 1 else [])
        assert set(names) == {*norms, "attention.out.bias", "mlp.down.bias"}


@pytest.mark.parametrize("world_size, why", [(5, "144 features cannot"), (8, "unflatten")])
def test_heads_that_do_not_divide_are_refused(ranks, world_size, why):
    with pytest.raises(RankFailed, match=why):
        ranks(world_size, take_gradients, False)


def test_a_step_is_shown_as_far_off_below_as_above_one_process(monkeypatch):
    one = torch.tensor(4.0), torch.tensor([3.0, 4.0]), []
    of_ranks = [(torch.tensor(its), torch.tensor([3.0, its]), ["norm"]) for its in (3.0, 5.0)]

    def launch(worker, ranks, *given):
        return SimpleNamespace(results=[[one] if ranks == 1 else of_ranks])

    monkeypatch.setattr(figures, "launch", launch)
    rows = figures.step_table(copies, whole_of).rows
    assert rows == [[name, "25.0%", "20.0%", 1] for name in ("copies", "whole_of")]
