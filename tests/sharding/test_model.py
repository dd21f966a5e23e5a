"""ZeRO 3: what a rank keeps, when a unit is there, and in which numbers it computes."""

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
from mgpu_tutorial.sharding.model import ShardedModel, cast
from tests.sharding.reference import batches, loss_of, mean_gradients, new_model, values


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
    """The bytes of the module before, those left in its tensors, those behind the shards."""
    module = new_model()
    whole = list(module.parameters())
    before = sum(p.nbytes for p in whole)
    model = ShardedModel(module)
    left = sum(p.untyped_storage().nbytes() for p in whole)
    return before, left, sum(p.untyped_storage().nbytes() for p in model.parameters())


def test_a_rank_keeps_its_shards_and_nothing_else(ranks):
    parameters = 185 + 320 + 2 * (4 * 5 + 4 * 25 + 100 + 20 + 100 + 5) + 10
    padded = parameters + 3  # one in each unit
    assert ranks(2, count_bytes).results == [(8 * parameters, 0, 8 * padded // 2)] * 2


def are_gone(memories):
    """Is all of it given back? A thread of the process group may let go a little later."""
    limit = time.monotonic() + 5
    while not all(memory.expired() for memory in memories) and time.monotonic() < limit:
        time.sleep(0.01)
    return [memory.expired() for memory in memories]


def watch_gathered(rank, world_size):
    """Is the memory of three gathered weights given back after forward, and backward?"""
    module = new_model()
    model = ShardedModel(module)
    seen = []

    def look(layer, _):
        seen.append(StorageWeakRef(layer.weight.untyped_storage()))
        assert not seen[-1].expired()

    for layer in (module.token, module.blocks[0].mlp.up, module.blocks[1].mlp.down):
        layer.register_forward_pre_hook(look)
    loss = loss_of(model, 0)
    after_forward = are_gone(seen)
    loss.backward()
    return after_forward, are_gone(seen)


def test_nobody_keeps_a_gathered_weight_between_forward_and_backward(ranks):
    assert ranks(2, watch_gathered).results == [([True] * 3,) * 2] * 2


def take_two_steps(rank, world_size, prefetch):
    """Three layers note when they have computed and when their backward begins."""
    layers = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7), nn.Linear(7, 9))
    for i, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, i=i: note(f"forward {i}"))
        layer.register_full_backward_pre_hook(lambda *_, i=i: note(f"backward {i}"))
    model = ShardedModel(layers, prefetch=prefetch)
    for step in (1, 2):
        note(f"step {step}")
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()
        model.finish_gradient_synchronization()
    note("step 3")


def what_happened(report, step):
    """What rank 0 did in a step, in order; a call is named by the layer that it is for."""
    names = {}
    for layer, numbers in enumerate((4 * 5, 6 * 7, 8 * 9)):  # of float32; a rank has half
        names["all_gather_single", 4 * numbers] = f"gather {layer}"
        names["reduce_scatter_single", 2 * numbers] = f"scatter {layer}"
    mine = [event for event in report.events if event.rank == 0]
    lines = [event.note or names.get((event.op, event.nbytes)) for event in mine]
    begin, end = lines.index(f"step {step}"), lines.index(f"step {step + 1}")
    return [line for line in lines[begin + 1 : end] if line]


def test_a_unit_is_gathered_before_its_turn_and_the_next_one_with_it(ranks):
    report = ranks(2, take_two_steps, True, trace=True)
    assert what_happened(report, 2) == [
        *("gather 0", "gather 1", "forward 0", "gather 2", "forward 1", "forward 2"),
        *("backward 2", "gather 2", "gather 1", "scatter 2"),
        *("backward 1", "gather 0", "scatter 1", "backward 0", "scatter 0"),
    ]
    # the order of the units is known only when the first forward is over
    first = ["gather 0", "forward 0", "gather 1", "forward 1", "gather 2", "forward 2"]
    assert what_happened(report, 1)[:6] == first


def test_without_prefetching_every_gather_is_made_when_it_is_needed(ranks):
    report = ranks(2, take_two_steps, False, trace=True)
    assert what_happened(report, 2) == [
        *("gather 0", "forward 0", "gather 1", "forward 1", "gather 2", "forward 2"),
        *("backward 2", "gather 2", "scatter 2"),
        *("backward 1", "gather 1", "scatter 1", "backward 0", "gather 0", "scatter 0"),
    ]


# Numbers of other kinds


def train_in_bfloat16(rank, world_size, only_blocks):
    """Dtypes on a block's way, of what is kept, and the square of the gradient here."""
    module = new_model(torch.float32)
    units = list(module.blocks) if only_blocks else None
    model = ShardedModel(module, units, compute_dtype=torch.bfloat16)
    seen = []

    def look(block, inputs):
        seen.extend([inputs[0].dtype, block.mlp.up.weight.dtype])

    module.blocks[1].register_forward_pre_hook(look)
    module.blocks[1].register_forward_hook(lambda block, _, out: seen.append(out.dtype))
    output = model(batches(0, world_size)[rank])
    loss_of(model, 0).backward()
    model.finish_gradient_synchronization()
    parameters = list(model.parameters())
    kept = {p.dtype for p in parameters} | {p.grad.dtype for p in parameters}
    square = sum(p.grad.double().square().sum().item() for p in model.shards)
    return seen[:3], output.dtype, kept, square


@pytest.mark.parametrize("only_blocks", [True, False])
def test_units_compute_in_short_and_the_rest_in_long_numbers(ranks, only_blocks):
    report = ranks(2, train_in_bfloat16, only_blocks, trace=True)
    short, long = torch.bfloat16, torch.float32
    for seen, output, kept, _ in report.results:
        # what comes out of a unit that is inside no other one is long again
        assert seen == [short, short, long if only_blocks else short]
        assert output == long and kept == {long}
    # 2 bytes for each number of a unit, padded to two equal shards; a rank receives one
    units = {2 * 5 + 4 * 25 + 2 * 5 + 100 + 20 + 100 + 5 + 1}
    if not only_blocks:
        units |= {185 + 320 + 10 + 1}
        expected = sum(g.square().sum().item() for g in mean_gradients().values())
        squares = sum(square for *_, square in report.results)
        assert squares == pytest.approx(expected, rel=0.05)  # eight binary digits
    sent = {(e.op, e.nbytes) for e in report.events if e.op.endswith("single")}
    assert sent == {("all_gather_single", 2 * unit) for unit in units} | {
        ("reduce_scatter_single", unit) for unit in units
    }


def average_short_gradients(rank, world_size):
    """The mean of the gradients 1, 1 and 2, which travel in bfloat16."""
    model = ShardedModel(nn.Linear(1, 3, bias=False), compute_dtype=torch.bfloat16)
    model(torch.tensor([[1.0 + (rank == 2)]])).sum().backward()
    model.finish_gradient_synchronization()
    return model.shards[0].grad.item()


def test_the_mean_is_taken_in_the_numbers_of_the_shard(ranks):
    found = ranks(3, average_short_gradients).results
    assert found == [torch.tensor(4 / 3).item()] * 3  # in bfloat16 1.328125


def test_only_numbers_with_a_point_are_cast():
    given = {"x": [torch.ones(1)], "tokens": torch.ones(1, dtype=torch.long), "scale": 2}
    found = cast(given, torch.bfloat16)
    assert found["x"][0].dtype == torch.bfloat16
    assert found["tokens"].dtype == torch.long and found["scale"] == 2


# Whole values, and two backwards


def set_and_get(rank, world_size, units):
    """Whole values go in on every rank, and come out again, and not as views."""
    model = ShardedModel(new_model(), units)
    model.load_full_parameters(
        {name: value + i for i, (name, value) in enumerate(values(new_model()).items())}
    )
    for value in model.full_parameters().values():
        value.zero_()
    return model.full_parameters()


@pytest.mark.parametrize("units", [None, []])
def test_whole_values_go_in_and_come_out(ranks, units):
    given = {n: v + i for i, (n, v) in enumerate(values(new_model()).items())}
    for found in ranks(2, set_and_get, units).results:
        assert list(found) == list(given)
        assert largest_difference(found, given) == 0


def add_up(rank, world_size, units, finish_each):
    """Two forwards and backwards before one step of SGD with a rate of 1."""
    model = ShardedModel(new_model(), units)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in (0, 1):
        loss_of(model, step).backward()
        if finish_each or step == 1:
            model.finish_gradient_synchronization()
    optimizer.step()
    return model.full_parameters()


@pytest.mark.parametrize(("units", "finish_each"), [(None, False), (None, True), ([], False)])
def test_two_backwards_before_a_step_add_up(ranks, units, finish_each):
    before, gradients = values(new_model()), mean_gradients(steps=(0, 1))
    expected = {name: before[name] - gradients[name] for name in before}
    report = ranks(2, add_up, units, finish_each)
    assert largest_difference(report.results, [expected] * 2) < 1e-14
