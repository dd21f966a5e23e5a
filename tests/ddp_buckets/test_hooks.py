"""Communication hooks: the bytes that travel, and the average that comes back."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets import hooks, measurements
from mgpu_tutorial.lab import RankFailed, launch
from mgpu_tutorial.lab.record.report import Report


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


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("hook", [hooks.as_bfloat16, hooks.eight_bits])
def test_a_hook_returns_the_mean_up_to_its_rounding(hook, world_size):
    results = launch(averaged, world_size, hook).results
    for got, exact in results:
        unit = exact.abs().max() / (127 // world_size)
        atol = 2 * unit if hook is hooks.eight_bits else 1e-3
        torch.testing.assert_close(got, exact, rtol=0.01, atol=float(atol))
        assert not torch.equal(got, exact)
        torch.testing.assert_close(got, results[0][0], rtol=0, atol=0)


def test_each_hook_sends_the_bytes_that_we_say_and_learns():
    report = launch(hooks.train_with_each_hook, 2, list(hooks.HOOKS), trace=True)
    numbers = sum(p.numel() for p in hooks.digit_net().parameters())
    sent = {name: measurements.payload(report, name) for name in hooks.HOOKS}
    assert numbers == 50_890 and sent["float32"] == 4 * numbers
    assert sent["float16"] == sent["bfloat16"] == 2 * numbers
    assert sent["eight bits"] == numbers + 4
    # Two matrices of rank 1 for each weight, and the biases as they are.
    assert sent["PowerSGD"] == 4 * (784 + 64 + 64 + 10 + 64 + 10)
    losses = measurements.mean_losses(report)
    for name in ("float16", "bfloat16", "eight bits"):
        apart = torch.tensor(losses[name]) - torch.tensor(losses["float32"])
        assert 0 < apart.abs().max() < 0.05
    assert losses["float32"][-1] < losses["PowerSGD"][-1] < losses["PowerSGD"][0] / 2


def test_the_mean_loss_is_that_of_the_ranks():
    first = {"float32": [1.0, 4.0], "eight bits": [2.0, 0.0]}
    second = {"float32": [2.0, 8.0], "eight bits": [6.0, 1.0]}
    means = measurements.mean_losses(Report(2, [first, second]))
    assert means == {"float32": [1.5, 6.0], "eight bits": [4.0, 0.5]}


def test_the_built_in_bfloat16_hook_averages_over_gloo_under_another_name():
    assert launch(hooks.average_under_another_name, 2, device="cpu").results == [1.5, 1.5]
    assert launch(hooks.average_under_another_name, 3, device="cpu").results == [
        2.0,
        2.0,
        2.0,
    ]


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
