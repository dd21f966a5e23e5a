"""Shards, attention and copies of the block: what its builds do not try."""

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.tensor_parallel.block import (
    PLAN,
    Attention,
    copies,
    copies_that_differ,
    new_block,
    parallelize,
)
from mgpu_tutorial.tensor_parallel.layers import shard


def kept_of_a_shard(rank, world_size):
    return shard(torch.ones(4, 6), 1).untyped_storage().nbytes()


def test_a_shard_keeps_nothing_of_the_other_ranks_parts(ranks):
    assert ranks(2, kept_of_a_shard).results == [48, 48]  # of 96 bytes


def test_attention_is_pytorch_s_with_the_columns_of_a_head_side_by_side():
    ours, x = Attention(12, 2).double(), torch.randn(2, 5, 12).double()
    theirs = nn.MultiheadAttention(12, 2, batch_first=True).double()
    theirs.out_proj = ours.out
    for name, parameter in ours.qkv.named_parameters():
        heads_last = parameter.unflatten(0, (2, 3, 6)).transpose(0, 1).flatten(0, 2)
        setattr(theirs, f"in_proj_{name}", nn.Parameter(heads_last))
    mask = nn.Transformer.generate_square_subsequent_mask(5).double()
    assert largest_difference(ours(x), theirs(x, x, x, attn_mask=mask)[0]) < 1e-14


def change_a_copy(rank, world_size):
    """One bit of a copy on rank 1 of a group of three: which differ before, and after?"""
    group = dist.new_subgroups_by_enumeration([[0, 1, 2], [3]])[0]
    block = parallelize(new_block(), PLAN, group)
    before = copies_that_differ(block, group)
    if rank == 1:
        with torch.no_grad():
            block.mlp_norm.weight[3] += 1e-15
    return before, copies_that_differ(block, group), list(copies(block))


def test_one_bit_of_one_copy_is_found_in_its_group(ranks):
    norms = [f"{n}_norm.{part}" for n in ("attention", "mlp") for part in ("weight", "bias")]
    for rank, (before, after, names) in enumerate(ranks(4, change_a_copy).results):
        assert before == [] and after == (["mlp_norm.weight"] if rank < 3 else [])
        assert set(names) == {*norms, "attention.out.bias", "mlp.down.bias"}
