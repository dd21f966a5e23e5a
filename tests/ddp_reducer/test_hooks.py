"""Communication hooks: what travels, and the average that comes back."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_reducer import hooks
from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.shared.data import digits


def average(rank, world_size, hook):
    """The mean of some gradients through a hook, and this rank's own."""
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Linear(40, 5, bias=False))
    model.register_comm_hook(None, hook)
    own = 1e6 * (1 + rank) * torch.randn(5, 40)  # float16 ends at 65504
    (model(torch.eye(40)) * own.T).sum().backward()
    return model.module.weight.grad, own


SHORT = {
    hooks.as_bfloat16: torch.Tensor.bfloat16,
    hooks.as_signs: lambda own: own.sign() * own.abs().mean(),
}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("hook", SHORT)
def test_what_arrives_is_the_mean_of_what_the_hook_makes_of_each_gradient(
    ranks, world_size, hook
):
    results = ranks(world_size, average, hook).results
    expected = torch.stack([SHORT[hook](own).float() for _, own in results]).mean(0)
    for mean, _ in results:
        largest = expected.abs().max()
        torch.testing.assert_close(mean, expected, rtol=0.01, atol=largest / 100)
        assert torch.equal(mean, results[0][0])
        is_short = torch.equal(mean, mean.bfloat16().float())
        assert is_short is (hook is hooks.as_bfloat16)


def renamed(state, bucket):
    return bf16_compress_hook(state, bucket)


def average_without_cuda(rank, world_size, hook):
    torch.version.cuda = torch.version.hip = None  # as if PyTorch was built for the CPU
    dist.is_xccl_available = lambda: False
    average(rank, world_size, hook)


def test_the_built_in_bfloat16_hook_is_refused_by_its_name_where_there_is_no_cuda(ranks):
    """If this is red, PyTorch has changed its check: the notebook tells of it."""
    ranks(2, average_without_cuda, renamed, device="cpu")
    with pytest.raises(RankFailed, match="BF16 all reduce communication hook required"):
        ranks(2, average_without_cuda, bf16_compress_hook, device="cpu")


def losses_of_one_process():
    """Each batch's mean loss in three epochs of 1438 digits, 120 at a time."""
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10)]
    model, data, losses = nn.Sequential(*layers), digits(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.5)
    for epoch in range(3):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1 + epoch))
        for batch in order.split(120):
            optimizer.zero_grad()
            loss = cross_entropy(model(data.images[batch]), data.labels[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_unequal_shares_of_a_batch_count_by_their_samples(ranks, world_size):
    """Three ranks have 40, 39 and 39 of the last batch; four have 30, 30, 29 and 29."""
    expected = pytest.approx(losses_of_one_process(), abs=1e-5)
    for found in ranks(world_size, hooks.train_digits, None).results:
        assert found == expected


def test_feedback_repairs_what_signs_alone_lose(ranks):
    """The mean of the last six losses: the order that the notebook tells of."""
    rest = {hooks.signs_with_feedback: {}}
    tried = [None, hooks.as_bfloat16, hooks.signs_with_feedback, hooks.as_signs]
    runs = [ranks(2, hooks.train_digits, h, rest.get(h)).results[0] for h in tried]
    whole, short, feedback, signs = (sum(losses[-6:]) / 6 for losses in runs)
    assert abs(short - whole) < 0.01
    assert whole < feedback < 0.65 < 0.75 < signs
