"""ZeRO 3: what a rank keeps, when a unit is there, and in which numbers it computes."""

import re
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as some
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from mgpu_tutorial.lab import note
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.sharding.flat import Flat
from mgpu_tutorial.sharding.gradients import Slice
from mgpu_tutorial.sharding.model import ShardedModel
from mgpu_tutorial.sharding.training import loss_of
from tests.sharding.reference import new_model, values


@pytest.mark.parametrize("cut", [Slice, lambda p: Flat(nn.ParameterList(p), p, None)])
@given(
    sizes=some.lists(some.integers(1, 7), min_size=1, max_size=4), ranks=some.integers(1, 5)
)
def test_shards_are_equal_and_make_the_whole(cut, sizes, ranks):
    total = sum(sizes)
    shards = []
    for rank in range(ranks):
        numbers = torch.arange(1.0, total + 1).split(sizes)
        parameters = [nn.Parameter(part.clone()) for part in numbers]
        with patch.multiple(dist, get_world_size=lambda: ranks, get_rank=lambda r=rank: r):
            shards.append(cut(parameters).shard.detach())
    assert {shard.numel() for shard in shards} == {-(-total // ranks)}
    padding = [0.0] * (ranks * shards[0].numel() - total)
    assert torch.cat(shards).tolist() == [*range(1, total + 1), *padding]


def count_bytes(rank, world_size):
    """The bytes left in the module's tensors, and those of the shards."""
    module = new_model()
    whole = list(module.parameters())
    model = ShardedModel(module)
    return [sum(p.untyped_storage().nbytes() for p in own) for own in (whole, model.shards)]


def test_a_rank_keeps_its_shards_and_nothing_else(ranks):
    block, root = 4 * 5 + 4 * 25 + 100 + 20 + 100 + 5, 335 + 320 + 10
    padded = 2 * (block + 1) + root + 1  # for two equal shards of each unit
    assert ranks(2, count_bytes).results == [[0, 8 * padded // 2]] * 2


def are_freed(memories):
    """Is all of it given back? A thread of the process group may let go a little later."""
    limit = time.monotonic() + 5
    while not all(memory.expired() for memory in memories) and time.monotonic() < limit:
        time.sleep(0.01)
    return all(memory.expired() for memory in memories)


def watch_gathered(rank, world_size):
    """Is the memory of a gathered weight given back after forward, and after backward?"""
    module, seen = new_model(), []
    model = ShardedModel(module)
    for layer in (module.token, module.blocks[0].mlp.up):
        layer.register_forward_pre_hook(
            lambda layer, _: seen.append(StorageWeakRef(layer.weight.untyped_storage()))
        )
    loss = loss_of(model, 0, rank, world_size)
    after_forward = are_freed(seen)
    loss.backward()
    return len(seen), after_forward, are_freed(seen)


def test_nobody_keeps_a_gathered_weight_between_forward_and_backward(ranks):
    assert ranks(2, watch_gathered).results == [(2, True, True)] * 2


def take_two_steps(rank, world_size, prefetch):
    """Three layers note when they have computed and when their backward begins."""
    layers = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 9))
    for i, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, i=i: note(f"forward {i}"))
        layer.register_full_backward_pre_hook(lambda *_, i=i: note(f"backward {i}"))
    model = ShardedModel(layers, prefetch=prefetch)
    for _ in range(2):
        note("step")
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()
        model.finish_gradient_synchronization()


WHEN_NEEDED = """gather 0, forward 0, gather 1, forward 1, gather 2, forward 2,
    backward 2, gather 2, scatter 2, backward 1, gather 1, scatter 1, backward 0, gather 0,
    scatter 0"""
ONE_AHEAD = """gather 0, gather 1, forward 0, gather 2, forward 1, forward 2,
    backward 2, gather 2, gather 1, scatter 2, backward 1, gather 0, scatter 1, backward 0,
    scatter 0"""


@pytest.mark.parametrize(
    ("prefetch", "order"), [(False, WHEN_NEEDED), (True, ONE_AHEAD)], ids=["not", "ahead"]
)
def test_a_unit_is_gathered_when_it_is_needed_or_one_ahead(ranks, prefetch, order):
    report = ranks(2, take_two_steps, prefetch, trace=True)
    names = {}
    for layer, numbers in enumerate((4 * 5, 6 * 7, 8 * 9)):  # of float32; a rank has half
        names["all_gather_single", 4 * numbers] = f"gather {layer}"
        names["reduce_scatter_single", 2 * numbers] = f"scatter {layer}"
    mine = [e.note or names.get((e.op, e.nbytes)) for e in report.events if e.rank == 0]
    # the order of the units is known after the first forward
    second = mine[mine.index("step", mine.index("step") + 1) + 1 :]
    assert [name for name in second if name] == re.split(r",\s+", order)


# Short numbers


def train_in_bfloat16(rank, world_size, only_blocks):
    """The dtypes of the loss and of what is kept, and the gradients of this rank's shards."""
    module = new_model(torch.float32)
    units = list(module.blocks) if only_blocks else None
    model = ShardedModel(module, units, compute_dtype=torch.bfloat16)
    loss = loss_of(model, 0, rank, world_size)
    loss.backward()
    model.finish_gradient_synchronization()
    kept = {t.dtype for p in model.parameters() for t in (loss, p, p.grad)}
    return kept, torch.cat([p.grad for p in model.shards])


@pytest.mark.parametrize("only_blocks", [True, False])
def test_units_compute_in_short_and_keep_long_numbers(ranks, only_blocks):
    report = ranks(2, train_in_bfloat16, only_blocks, trace=True)
    assert all(kept == {torch.float32} for kept, _ in report.results)
    # 2 bytes for each number of a unit, padded to two equal shards; a rank receives one
    units = {4 * 5 + 4 * 25 + 100 + 20 + 100 + 5 + 1}
    if not only_blocks:
        units |= {335 + 320 + 10 + 1}
        alone = new_model()
        loss_of(alone, 0, 0, 1).backward()
        whole = torch.cat([p.grad.flatten() for p in alone.parameters()])
        found = torch.cat([gradients for _, gradients in report.results])
        assert found.norm().item() == pytest.approx(whole.norm().item(), rel=0.03)
    sent = {(e.op, e.nbytes) for e in report.events if e.op.endswith("single")}
    gathers = {("all_gather_single", 2 * unit) for unit in units}
    assert sent == gathers | {("reduce_scatter_single", unit) for unit in units}


# Whole values, and two backwards


def set_and_get(rank, world_size, units):
    """Whole values go in on every rank, and come out again."""
    model = ShardedModel(new_model(), units)
    model.load_full_parameters({name: v + 1 for name, v in values(new_model()).items()})
    return model.full_parameters()


@pytest.mark.parametrize("units", [None, []])
def test_whole_values_go_in_and_come_out(ranks, units):
    given = {name: value + 1 for name, value in values(new_model()).items()}
    report = ranks(2, set_and_get, units)
    assert largest_difference(report.results, [given] * 2) == 0


def add_up(rank, world_size, units, finish_each):
    """Two forwards and backwards before one step of SGD with a rate of 1."""
    model = ShardedModel(new_model(), units)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in (0, 1):
        loss_of(model, step, rank, world_size).backward()
        if finish_each or step == 1:
            model.finish_gradient_synchronization()
    optimizer.step()
    return model.full_parameters()


@pytest.mark.parametrize(("units", "finish_each"), [(None, False), (None, True), ([], False)])
def test_two_backwards_before_a_step_add_up(ranks, units, finish_each):
    alone = new_model()
    for step in (0, 1):
        loss_of(alone, step, 0, 1).backward()
    torch.optim.SGD(alone.parameters(), lr=1.0).step()
    report = ranks(2, add_up, units, finish_each)
    assert largest_difference(report.results, [values(alone)] * 2) < 1e-14
