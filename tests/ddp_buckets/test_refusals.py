"""A gradient that would stay a rank's own is named; odd models and sizes come out right."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.ddp_buckets import experiments
from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP, NaiveDDP
from mgpu_tutorial.lab import RankFailed

WRAPPERS = [NaiveDDP, BucketedDDP]


class Heads(nn.Module):
    """Two layers; a forward uses the second on demand."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x, both=True):
        return self.first(x) + (self.second(x) if both else 0)


def channels_last(rank, world_size, wrapper):
    """On all ranks a convolution's numbers do not lie row by row."""
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3)
    before = layer.weight.detach().clone()
    wrapper(layer.to(memory_format=torch.channels_last))
    return torch.equal(layer.weight, before)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_numbers_that_lie_otherwise_stay(ranks, wrapper):
    assert all(ranks(2, channels_last, wrapper).results)


CALLS = {NaiveDDP: 4, BucketedDDP: 4}  # a broadcast for each tensor


@pytest.mark.parametrize("wrapper", CALLS)
def test_wrapping_sends_the_start_and_no_more(ranks, wrapper):
    report = ranks(2, wrap, wrapper, trace=True)
    sent = [event.op for event in report.events if event.rank == 0]
    assert sent == ["broadcast"] * CALLS[wrapper]


def wrap(rank, world_size, wrapper):
    wrapper(Heads())


def train(rank, world_size, wrapper, spoil):
    model = wrapper(Heads())
    spoil(model)
    model.finish_gradient_synchronization()
    return model.module.first.bias.grad.item()


def use_all(model, both=True):
    model(torch.ones(1, 4), both).sum().backward()


def use_one(model):
    use_all(model, both=False)


def skip_backward(model):
    pass


def freeze(model):
    model.module.second.requires_grad_(False)
    use_all(model)


SPOILT = {use_one: "second.weight", skip_backward: "first.weight", freeze: "second.weight"}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("spoil", SPOILT)
def test_a_parameter_without_a_gradient_is_named(refused, wrapper, spoil):
    refused(2, f"`{SPOILT[spoil]}`", train, wrapper, spoil, sent=True)


def twice(model):
    use_all(model)
    use_all(model)


def finish_twice(model):
    use_all(model)
    model.finish_gradient_synchronization()


def test_what_buckets_cannot_do_twice_is_refused(refused):
    refused(2, "a second backward", train, BucketedDDP, twice, sent=True)
    refused(2, "`first.weight`", train, BucketedDDP, finish_twice, sent=True)


def leave_out_on_rank_1(rank, world_size, wrapper):
    train(rank, world_size, wrapper, use_one if rank == 1 else use_all)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_rank_that_leaves_a_parameter_out_is_the_one_that_raises(ranks, wrapper):
    with pytest.raises(RankFailed, match="rank 1 raised RuntimeError: `second.weight`"):
        ranks(2, leave_out_on_rank_1, wrapper, timeout=10)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_step_is_taken_without_a_warning(ranks, wrapper):
    assert ranks(2, train, wrapper, use_all).stderr == ["", ""]


# right: odd modules, compared with one process


def plain():
    return nn.Sequential(nn.Linear(8, 3), nn.Linear(3, 8))


def without_bias():
    return nn.Linear(8, 2, bias=False)


def tied():
    module = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    module[2].weight = module[0].weight
    return module


def partly_frozen():
    module = plain()
    module[0].requires_grad_(False)
    return module


def with_buffers():
    return nn.Sequential(nn.Linear(8, 3), nn.BatchNorm1d(3).eval())


def with_a_number():
    return nn.Sequential(nn.Linear(8, 3), nn.PReLU())


def strided():
    module = plain()
    module[0].weight = nn.Parameter(torch.randn(8, 3).T)
    return module


ODD = [plain, without_bias, tied, partly_frozen, with_buffers, with_a_number, strided]


def two_steps(rank, world_size, wrapper, make, dtype, options, backwards=1):
    """The gradients of the second step, from the mean loss of this rank's share of 12."""
    torch.manual_seed(rank)
    module = make().to(dtype)
    model = wrapper(module, **options) if wrapper else module
    for _ in range(2):
        module.zero_grad()
        for part in torch.linspace(-1, 1, 96).view(12, 8).to(dtype).chunk(backwards):
            share = part.tensor_split(world_size)[rank]
            (model(share).square().mean() / backwards).backward()
        experiments.finish_gradient_synchronization(model)
    return {n: p.grad for n, p in module.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("make", ODD)
@pytest.mark.parametrize(
    "wrapper, options",
    [(NaiveDDP, {}), *((BucketedDDP, {"bucket_cap_mb": cap}) for cap in (0, 1e-5, math.inf))],
)
def test_odd_modules_get_the_gradients_of_one_process(
    ranks, wrapper, options, make, world_size
):
    alone = two_steps(0, 1, None, make, torch.float64, {})
    call = two_steps, wrapper, make, torch.float64, options
    for found in ranks(world_size, *call).results:
        torch.testing.assert_close(found, alone)


def in_a_group_of_two(rank, world_size, wrapper):
    """Ranks 0 and 2 train beside ranks 1 and 3; returns this rank's parameters at the end."""
    groups = [dist.new_group([first, first + 2]) for first in (0, 1)]
    return steps_of(rank // 2, 2, rank % 2, wrapper, groups[rank % 2])


def in_a_world_of_two(rank, world_size, wrapper, which):
    return steps_of(rank, 2, which, wrapper, None)


def steps_of(place, ranks_of_it, which, wrapper, group):
    """Three steps of the model `which` on this place's share of its batches."""
    torch.manual_seed(10 * which + place)
    module = tied()
    model = wrapper(module, group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        whole = torch.linspace(-1, 1 + step + which, 96).view(12, 8)
        optimizer.zero_grad()
        model(whole.tensor_split(ranks_of_it)[place]).square().mean().backward()
        model.finish_gradient_synchronization()
        optimizer.step()
    return [p.detach() for p in module.parameters()]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_two_groups_of_two_ranks_are_two_worlds_of_two(ranks, wrapper):
    together = ranks(4, in_a_group_of_two, wrapper).results
    for which in (0, 1):
        alone = ranks(2, in_a_world_of_two, wrapper, which).results
        for found, expected in zip(together[which::2], alone, strict=True):
            assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_dtypes_stay_and_are_averaged(ranks, wrapper, dtype):
    alone = two_steps(0, 1, None, plain, dtype, {})
    for found in ranks(3, two_steps, wrapper, plain, dtype, {}).results:
        torch.testing.assert_close(found, alone, rtol=0.05, atol=0.01)


def test_naive_averages_what_two_backwards_add_up(ranks):
    alone = two_steps(0, 1, None, plain, torch.float64, {}, 2)
    for found in ranks(2, two_steps, NaiveDDP, plain, torch.float64, {}, 2).results:
        torch.testing.assert_close(found, alone)


class Short(nn.Module):
    """Layers of 16 bits around a norm of 32, as many models have them."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(8, 4).bfloat16(), nn.LayerNorm(4)
        self.last = nn.Linear(4, 2).bfloat16()

    def forward(self, x):
        return self.last(self.norm(self.first(x.bfloat16()).float()).bfloat16()).float()


def average_two_dtypes(rank, world_size):
    """Its own gradients and their means, as one call for each would give them."""
    torch.manual_seed(0)
    model = BucketedDDP(module := Short())
    x = torch.randn(4, 8).chunk(world_size)[rank]
    alone = torch.autograd.grad(model(x).square().mean(), list(module.parameters()))
    for gradient in alone:
        dist.all_reduce(gradient, dist.ReduceOp.AVG)
    model(x).square().mean().backward()
    model.finish_gradient_synchronization()
    return alone, [p.grad for p in module.parameters()]


def test_each_bucket_has_one_dtype(ranks):
    for alone, found in ranks(2, average_two_dtypes).results:
        torch.testing.assert_close(found, list(alone), rtol=0, atol=0)


def wrap_for_others(rank, world_size, wrapper):
    wrapper(plain(), group=[dist.new_group([0]), dist.new_group([1])][1 - rank])


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_group_of_other_ranks_is_refused(refused, wrapper):
    refused(2, ValueError("group"), wrap_for_others, wrapper, sent=True)
