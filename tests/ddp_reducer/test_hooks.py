"""Communication hooks: the bytes that travel, and the average that comes back."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
    PowerSGDState,
    powerSGD_hook,
)
from torch.nn.functional import nll_loss
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_reducer import figures, hooks
from mgpu_tutorial.lab import RankFailed


def average_random_gradients(rank, world_size, hook, scale=1.0):
    """The mean of rank-dependent gradients through a hook, beside the exact one.

    The last rank's are 100 times as large as the others'.
    """
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(40, 5))
    model.register_comm_hook(None, hook)
    inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(rank))
    weight = scale * (100 if rank == world_size - 1 else 1)
    plain = nn.Linear(40, 5)
    plain.load_state_dict(model.module.state_dict())
    (weight * model(inputs).square().mean()).backward()
    (weight * plain(inputs).square().mean()).backward()
    exact = plain.weight.grad
    largest = max(float(p.grad.abs().max()) for p in plain.parameters())
    dist.all_reduce(exact, op=dist.ReduceOp.AVG)
    return model.module.weight.grad, exact, largest


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-4])
def test_eight_bits_return_the_mean_up_to_their_rounding(ranks, world_size, scale):
    results = ranks(world_size, average_random_gradients, hooks.eight_bits, scale).results
    largest = max(result[2] for result in results)
    unit = largest / (127 // world_size)
    for mean, exact, _ in results:
        # each rank rounds by at most half a unit, and so does their mean
        torch.testing.assert_close(mean, exact, rtol=1e-5, atol=0.51 * unit)
        assert torch.equal(mean, results[0][0])
        whole = mean * world_size / unit
        assert (whole - whole.round()).abs().max() < 0.01


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("scale", [1.0, 1e7])  # float16 ends at 65504
def test_bfloat16_returns_the_mean_to_two_digits(ranks, world_size, scale):
    results = ranks(world_size, average_random_gradients, hooks.as_bfloat16, scale).results
    for mean, exact, largest in results:
        torch.testing.assert_close(mean, exact, rtol=0.02, atol=largest / 200)
        assert torch.equal(mean, results[0][0]) and mean.dtype is torch.float32
        assert torch.equal(mean, mean.bfloat16().float()) and not torch.equal(mean, exact)


def average_with_the_built_in_hook(rank, world_size, its_own_name):
    torch.version.cuda = torch.version.hip = None  # as if PyTorch was built for the CPU
    dist.is_xccl_available = lambda: False

    def hook(state, bucket):
        return bf16_compress_hook(state, bucket)

    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model.register_comm_hook(None, bf16_compress_hook if its_own_name else hook)
    model(torch.full((1, 1), rank + 1.0)).sum().backward()
    return model.module.weight.grad.item()


def test_the_built_in_bfloat16_hook_is_refused_by_its_name_where_there_is_no_cuda(ranks):
    """If this is red, PyTorch has changed its check: the notebook tells of it."""
    call = 2, average_with_the_built_in_hook
    assert ranks(*call, its_own_name=False, device="cpu").results == [1.5, 1.5]
    with pytest.raises(RankFailed, match="BF16 all reduce communication hook required"):
        ranks(*call, its_own_name=True, device="cpu")


def average_zeros(rank, world_size, hook):
    model = DistributedDataParallel(nn.Linear(3, 2))
    model.register_comm_hook(None, hook)
    (0 * model(torch.ones(1, 3))).sum().backward()
    return model.module.weight.grad


@pytest.mark.parametrize("hook", [hooks.as_bfloat16, hooks.eight_bits])
def test_gradients_of_zero_stay_zero(ranks, hook):
    for found in ranks(2, average_zeros, hook).results:
        assert torch.equal(found, torch.zeros(2, 3))


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
    (own,) = torch.autograd.grad(layer(inputs).square().mean(), [layer.weight])
    mean = own.clone()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    return layer.weight.grad, hooks.average_as_product(own, row), mean


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_power_sgd_is_the_mean_along_one_column(ranks, world_size):
    for gradient, (column, row), mean in ranks(world_size, compress_twice).results:
        torch.testing.assert_close(torch.outer(column, row), gradient)
        torch.testing.assert_close(torch.outer(column, column) @ mean, gradient)
        assert (gradient - mean).norm() > 0.1 * mean.norm()  # something is left out


def losses_of_one_process(steps):
    """SGD with momentum on the whole batches, written out."""
    torch.manual_seed(0)
    model = hooks.digit_net()
    parameters, velocity = list(model.parameters()), [0.0] * 4
    losses = []
    for images, labels in hooks.digit_batches(0, 1, steps):
        loss = nll_loss(model(images), labels)
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            velocity = [0.5 * v + g for v, g in zip(velocity, gradients, strict=True)]
            for p, v in zip(parameters, velocity, strict=True):
                p -= 0.02 * v
        losses.append(loss.item())
    return losses


@pytest.fixture
def trained(ranks):
    """The traces of training on two ranks, by the name of the hook."""
    return {name: ranks(2, hooks.train_digits, name, trace=True) for name in hooks.HOOKS}


def test_each_hook_sends_the_bytes_that_we_say(trained):
    numbers = sum(p.numel() for p in hooks.digit_net().parameters())
    sent = {name: figures.bytes_of_last_step(run) for name, run in trained.items()}
    assert numbers == 50_890 and sent["float32"] == 4 * numbers
    assert sent["float16"] == sent["bfloat16"] == 2 * numbers
    assert sent["eight bits"] == numbers + 4
    # Two matrices of rank 1 for each weight, and the biases as they are.
    vectors = 4 * (784 + 64 + 64 + 10 + 64 + 10)
    assert sent["PowerSGD"] == sent["no feedback"] == vectors
    for name in ("PowerSGD", "no feedback"):  # two steps whole, then compressed
        run = trained[name]
        steps = [figures.payload(run, f"step {step}") for step in range(4)]
        assert steps == [4 * numbers] * 2 + [vectors] * 2, name


def test_each_hook_learns_and_what_is_left_out_must_be_kept(trained):
    losses = {name: figures.mean_losses(run) for name, run in trained.items()}
    assert losses["float32"] == pytest.approx(losses_of_one_process(36), abs=1e-4)
    for name in ("float16", "bfloat16", "eight bits"):
        apart = torch.tensor(losses[name]) - torch.tensor(losses["float32"])
        assert 0 < apart.abs().max() < 0.05
    assert losses["float32"][-1] < losses["PowerSGD"][-1] < losses["PowerSGD"][0] / 2
    assert losses["no feedback"][-1] > 1.5 * losses["PowerSGD"][-1]
    assert all(len(values) == 36 for values in losses.values())


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_batches_of_the_ranks_are_those_of_one_process(world_size):
    whole = [labels.tolist() for _, labels in hooks.digit_batches(0, 1, 30)]
    shares = [list(hooks.digit_batches(r, world_size, 30)) for r in range(world_size)]
    for labels, *parts in zip(whole, *shares, strict=True):
        assert sorted(labels) == sorted(sum((p.tolist() for _, p in parts), []))
        assert len({len(p) for _, p in parts}) == 1
    assert len(whole) == 30 and len({tuple(labels) for labels in whole}) == 30
