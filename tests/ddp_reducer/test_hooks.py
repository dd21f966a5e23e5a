"""Communication hooks: the bytes that travel, and the average that comes back."""

from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.experiments import Tower
from mgpu_tutorial.ddp_reducer import hooks, measurements
from mgpu_tutorial.lab import RankFailed, launch
from mgpu_tutorial.lab.record.report import Report
from mgpu_tutorial.shared.cost_model import Link
from tests.thorough import TRAINED, again
from tests.together import together

OURS = [hooks.as_bfloat16, hooks.eight_bits]


def averaged(rank, world_size, hook):
    """The mean of rank-dependent gradients through a hook, beside the exact one."""
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(40, 5))
    model.register_comm_hook(None, hook)
    generator = torch.Generator().manual_seed(rank)
    inputs = torch.randn(8, 40, generator=generator)
    model(inputs).square().mean().backward()
    plain = nn.Linear(40, 5)
    plain.load_state_dict(model.module.state_dict())
    plain(inputs).square().mean().backward()
    dist.all_reduce(plain.weight.grad, op=dist.ReduceOp.AVG)
    return model.module.weight.grad, plain.weight.grad


@cache
def found(world_size):
    """What the ranks return of our hooks and of PowerSGD, in one launch."""
    calls = {hook: partial(averaged, hook=hook) for hook in OURS} | {
        worker: worker for worker, sizes in OTHERS.items() if world_size in sizes
    }
    return dict(zip(calls, together(world_size, *calls.values()), strict=True))


@cache
def means(world_size):
    """What each of two hooks makes of the gradients 1, 2 and so on, in one launch."""
    given = (under_another_name, hooks.eight_bits)
    calls = [partial(measurements.average_with, hook=hook) for hook in given]
    return dict(zip(given, together(world_size, *calls, device="cpu"), strict=True))


@pytest.mark.parametrize("world_size", [1, *TRAINED])
@pytest.mark.parametrize("hook", OURS)
def test_a_hook_returns_the_mean_up_to_its_rounding(hook, world_size):
    results = found(world_size)[hook]
    for got, exact in results:
        unit = exact.abs().max() / (127 // world_size)
        atol = 2 * unit if hook is hooks.eight_bits else 1e-3
        torch.testing.assert_close(got, exact, rtol=0.01, atol=float(atol))
        assert not torch.equal(got, exact)
        torch.testing.assert_close(got, results[0][0], rtol=0, atol=0)


def compress_twice(rank, world_size):
    """A gradient from torch's PowerSGD, the same by hand from its last row, and the mean."""
    layer = nn.Linear(40, 5, bias=False)
    model = DistributedDataParallel(layer)
    state = PowerSGDState(None, 1, start_powerSGD_iter=2, use_error_feedback=False)
    model.register_comm_hook(state, powerSGD_hook)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        before = state.q_memory_dict.get(0)
        row = None if before is None else before / before.norm()
        inputs = torch.randn(8, 40, generator=generator)
        model.zero_grad()
        model(inputs).square().mean().backward()
    (mine,) = torch.autograd.grad(layer(inputs).square().mean(), [layer.weight])
    mean = mine.clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return layer.weight.grad, hooks.average_as_product(mine, row), mean


@pytest.mark.parametrize("world_size", [1, 2, again(3)])
def test_power_sgd_is_the_mean_along_one_column(world_size):
    for got, (column, row), mean in found(world_size)[compress_twice]:
        torch.testing.assert_close(torch.outer(column, row), got)
        torch.testing.assert_close(torch.outer(column, column) @ mean, got)
        assert (got - mean).norm() > 0.1 * mean.norm()  # something is left out


def two_by_two(rank, world_size):
    gradients = torch.tensor([[[5.0, 0], [2, 2]], [[1, 2], [0, 0]]])
    return torch.outer(*hooks.average_as_product(gradients[rank], torch.tensor([1.0, 0])))


OTHERS = {compress_twice: (1, 2, 3), two_by_two: (2,)}


def test_the_product_of_two_small_matrices_is_that_of_the_notebook():
    """The mean is [[3, 1], [1, 1]]; along the column (3, 1) / √10 the rest is left out."""
    for got in found(2)[two_by_two]:
        torch.testing.assert_close(got, torch.tensor([[3.0, 1.2], [1.0, 0.4]]))


@pytest.fixture(scope="module")
def trained():
    return {name: launch(hooks.train_digits, 2, name, trace=True) for name in hooks.HOOKS}


def test_each_hook_sends_the_bytes_that_we_say(trained):
    numbers = sum(p.numel() for p in hooks.digit_net().parameters())
    sent = {name: measurements.bytes_of_last_step(run) for name, run in trained.items()}
    assert numbers == 50_890 and sent["float32"] == 4 * numbers
    assert sent["float16"] == sent["bfloat16"] == 2 * numbers
    assert sent["eight bits"] == numbers + 4
    # Two matrices of rank 1 for each weight, and the biases as they are.
    vectors = 4 * (784 + 64 + 64 + 10 + 64 + 10)
    assert sent["PowerSGD"] == sent["no feedback"] == vectors


def test_each_hook_learns_and_what_is_left_out_must_be_kept(trained):
    losses = {name: measurements.mean_losses(run) for name, run in trained.items()}
    for name in ("float16", "bfloat16", "eight bits"):
        apart = torch.tensor(losses[name]) - torch.tensor(losses["float32"])
        assert 0 < apart.abs().max() < 0.05
    assert losses["float32"][-1] < losses["PowerSGD"][-1] < losses["PowerSGD"][0] / 2
    assert losses["no feedback"][-1] > 1.5 * losses["PowerSGD"][-1]


def test_the_batches_of_the_ranks_are_those_of_one_process():
    whole = [labels.tolist() for _, labels in hooks.digit_batches(0, 1, 45)]
    halves = [list(hooks.digit_batches(rank, 2, 45)) for rank in (0, 1)]
    for labels, (_, a), (_, b) in zip(whole, *halves, strict=True):
        assert sorted(labels) == sorted(a.tolist() + b.tolist())
    assert len(whole) == 45 and whole[0] != whole[1]


def test_the_mean_loss_is_that_of_the_ranks():
    assert measurements.mean_losses(Report(2, [[1.0, 4.0], [2.0, 8.0]])) == [1.5, 6.0]


def under_another_name(state, bucket):
    return bf16_compress_hook(state, bucket)


@pytest.mark.parametrize("world_size, mean", [(2, 1.5), (3, 2.0)])
def test_the_built_in_bfloat16_hook_averages_over_gloo_under_another_name(world_size, mean):
    assert means(world_size)[under_another_name] == [mean] * world_size


def test_over_a_slow_link_the_time_follows_the_bytes():
    link = Link(latency=1e-3, bandwidth=50e6)
    names = ["float32", "bfloat16", "PowerSGD"]
    for times in launch(measurements.time_each_hook, 2, names, link, steps=1).results:
        nbytes = sum(p.nbytes for p in Tower(512, 6).parameters())
        assert times["float32"] >= 2 + 1e3 * nbytes / 50e6
        assert times["bfloat16"] >= 2 + 1e3 * nbytes / 2 / 50e6
        assert times["PowerSGD"] >= 3 * 2


@pytest.mark.parametrize("world_size, mean", [(2, 1.5), (3, 2.0)])
def test_eight_bits_are_scaled_for_the_rank_with_the_largest_gradient(world_size, mean):
    largest = float(world_size)  # that of the last rank, where the first has 1
    unit = largest / (127 // world_size)
    assert means(world_size)[hooks.eight_bits] == pytest.approx([mean] * world_size, abs=unit)


def as_if_built(rank, world_size, cuda):
    """Register torch's hook by its own name, where PyTorch says that it is built so."""
    torch.version.cuda, torch.version.hip = cuda, None
    dist.is_nccl_available = lambda: cuda is not None
    dist.is_xccl_available = lambda: False
    torch.cuda.nccl.version = lambda: (2, 10)
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model.register_comm_hook(None, bf16_compress_hook)
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    return model.module.weight.grad.item()


def test_the_built_in_bfloat16_hook_looks_at_the_build_and_not_at_the_group():
    """If this is red, PyTorch has changed its check: the notebook tells of it."""
    assert launch(as_if_built, 2, "13.0", device="cpu").results == [1.5, 1.5]
    with pytest.raises(RankFailed, match="BF16 all reduce communication hook required"):
        launch(as_if_built, 2, None, device="cpu")
