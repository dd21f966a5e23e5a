"""Communication hooks: the bytes that travel, and the average that comes back."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_reducer import figures, hooks
from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.shared.data import digits


def average_random_gradients(rank, world_size, hook, scale=1.0):
    """The mean of rank-dependent gradients through a hook, the exact one, and the own one.

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
    own, exact = plain.weight.grad.clone(), plain.weight.grad
    dist.all_reduce(exact, op=dist.ReduceOp.AVG)
    return model.module.weight.grad, exact, own


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("scale", [1.0, 1e7])  # float16 ends at 65504
def test_bfloat16_returns_the_mean_to_two_digits(ranks, world_size, scale):
    results = ranks(world_size, average_random_gradients, hooks.as_bfloat16, scale).results
    largest = max(own.abs().max() for *_, own in results)
    for mean, exact, _ in results:
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


def losses_of_one_process():
    """SGD with momentum on the whole batches of three epochs, written out."""
    torch.manual_seed(0)
    first, second = nn.Linear(784, 64), nn.Linear(64, 10)
    parameters, velocity = [*first.parameters(), *second.parameters()], [0.0] * 4
    data, losses = digits(), []
    for epoch in range(3):
        lot = torch.Generator().manual_seed(1 + epoch)
        for batch in torch.randperm(len(data), generator=lot).split(120):
            output = second(first(data.images[batch].flatten(1)).relu())
            loss = cross_entropy(output, data.labels[batch])
            gradients = torch.autograd.grad(loss, parameters)
            with torch.no_grad():
                velocity = [0.5 * v + g for v, g in zip(velocity, gradients, strict=True)]
                for p, v in zip(parameters, velocity, strict=True):
                    p -= 0.02 * v
            losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_whole_gradients_learn_as_one_process_and_signs_only_with_their_rest():
    tried = None, hooks.as_bfloat16, hooks.as_signs, hooks.signs_with_feedback
    whole, short, signs, feedback = figures.learn_with(dict(enumerate(tried))).values()
    assert whole == pytest.approx(losses_of_one_process(), abs=0.01)
    assert short == pytest.approx(whole, abs=0.05)
    assert feedback[-1] < 1.2 * whole[-1]
    assert signs[-1] > 1.5 * whole[-1]


@pytest.mark.parametrize("world_size", [1, 3])
def test_signs_are_averaged_over_the_ranks(ranks, world_size):
    results = ranks(world_size, average_random_gradients, hooks.as_signs).results
    own = [exact_of_one.sign() * exact_of_one.abs().mean() for *_, exact_of_one in results]
    for mean, *_ in results:
        torch.testing.assert_close(mean, torch.stack(own).mean(0))
        assert torch.equal(mean, results[0][0])
