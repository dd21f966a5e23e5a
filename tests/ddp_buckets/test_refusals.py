"""What the wrappers cannot average they refuse; odd models and sizes come out right."""

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.ddp_buckets import experiments
from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP, NaiveDDP, into_buckets
from mgpu_tutorial.experts.parallel import ExpertParallel
from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.tensor_parallel.block import PLAN, new_block, parallelize

WRAPPERS = [NaiveDDP, BucketedDDP]


class Heads(nn.Module):
    """Two layers; a forward uses the second on demand."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x, both=True):
        return self.first(x) + (self.second(x) if both else 0)


def wrap(rank, world_size, wrapper, make, options):
    return wrapper(make(), **options).trained


def frozen():
    return Heads().requires_grad_(False)


def on_meta():
    return nn.Linear(2, 2, device="meta")


def buffer_on_meta():
    module = Heads()
    module.register_buffer("steps", torch.empty((), device="meta"))
    return module


def sparse():
    return nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))


def wrapped():
    return BucketedDDP(Heads()).module


def lazy():
    return nn.LazyLinear(2)


MODULES = {
    lazy: "`weight` has no shape before its lazy layer has seen a batch",
    frozen: "no parameter of this module is trained",
    nn.ReLU: "no parameter of this module is trained",
    on_meta: "`weight` is on the meta device",
    buffer_on_meta: "`steps` is on the meta device",
    sparse: "`0` has sparse gradients",
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("make", MODULES)
def test_modules_without_means_to_send_are_refused(refused, wrapper, make):
    refused(2, MODULES[make], wrap, wrapper, make, {})


def wrap_parts(rank, world_size, wrapper, make):
    """All ranks have other parts of one layer, and no group says so."""
    wrapper(parallelize(new_block(), PLAN) if make == "block" else ExpertParallel(8, 2))


@pytest.mark.parametrize("wrapper", [NaiveDDP, BucketedDDP])
@pytest.mark.parametrize("make", ["block", "experts"])
def test_parts_of_a_layer_are_not_averaged_as_if_they_were_copies(refused, wrapper, make):
    asks = wrapper is BucketedDDP  # first, whether all have the same cap
    refused(2, "is this rank's part of a layer", wrap_parts, wrapper, make, sent=asks)


def mixed():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())


@pytest.mark.parametrize(
    "words, make, cap",
    [
        ("trained parameters of torch.float32 and torch.float64", mixed, 25),
        ("bucket_cap_mb is -1", Heads, -1),
        ("bucket_cap_mb is nan", Heads, math.nan),
        ("bucket_cap_mb is '25'", Heads, "25"),
    ],
)
def test_buckets_that_cannot_be_are_refused(refused, words, make, cap):
    refused(2, words, wrap, BucketedDDP, make, {"bucket_cap_mb": cap})


def test_a_module_that_sends_by_itself_is_not_wrapped_again(refused):
    refused(2, "is in a BucketedDDP already", wrap, BucketedDDP, wrapped, {}, sent=True)


def lie_otherwise(rank, world_size, wrapper, everywhere):
    """The same convolution on all ranks; on rank 1, or all, its numbers lie otherwise."""
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 4, 3)
    before = layer.weight.detach().clone()
    if rank == 1 or everywhere:
        layer.to(memory_format=torch.channels_last)
    wrapper(layer)
    return torch.equal(layer.weight, before)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_numbers_that_lie_otherwise_on_one_rank_are_not_mixed_up(refused, wrapper):
    words = "strides"
    refused(2, words, lie_otherwise, wrapper, False, sent=True)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_numbers_that_lie_otherwise_on_all_ranks_stay(ranks, wrapper):
    assert all(ranks(2, lie_otherwise, wrapper, True).results)


def differ(rank, world_size, what):
    """Rank 1 has something else than the others, before it is wrapped."""
    module = Heads() if rank != 1 or what == "cap" else nn.Linear(4, 1)
    if what == "frozen" and rank == 1:
        module = Heads()
        module.second.requires_grad_(False)
    BucketedDDP(module, bucket_cap_mb=1 + (what == "cap" and rank == 1))


DIFFER = {
    "cap": "bucket_cap_mb must be the same on all ranks, and rank 1 of the group has 2,",
    "module": "rank 1 of the group has ('weight', (1, 4), 'torch.float32', True), where",
    "frozen": "rank 1 of the group has ('second.weight', (1, 4), 'torch.float32', False)",
}


@pytest.mark.parametrize("what", DIFFER)
def test_ranks_that_would_send_different_buckets_all_refuse(refused, what):
    refused(3, DIFFER[what], differ, what, sent=True)


def wrap_in_a_group_of_others(rank, world_size, wrapper):
    groups = [dist.new_group([r]) for r in range(world_size)]
    wrapper(Heads(), group=groups[1 - rank])


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_group_without_this_rank_is_refused(ranks, wrapper):
    says = "rank 1 raised ValueError: rank 1 isn't in the group that it was given"
    with pytest.raises(RankFailed, match=says):
        ranks(2, wrap_in_a_group_of_others, wrapper)


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


def thaw(model):
    model.module.third = nn.Linear(1, 1)
    use_all(model)


def replace_by_frozen(model):
    model.module.second = nn.Linear(4, 1).requires_grad_(False)
    use_all(model)


SPOILT = {
    use_one: "`second.weight` got no gradient",
    skip_backward: "`first.weight` got no gradient",
    freeze: "`second.weight` was frozen after the module was wrapped",
    thaw: "`third.weight` was thawed or replaced after the module was wrapped",
    replace_by_frozen: "a trained parameter was taken out of the module",
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("spoil", SPOILT)
def test_a_step_that_would_not_be_averaged_is_refused(refused, wrapper, spoil):
    refused(2, SPOILT[spoil], train, wrapper, spoil, sent=True)


def twice(model):
    use_all(model)
    use_all(model)


def finish_twice(model):
    use_all(model)
    model.finish_gradient_synchronization()


def test_what_buckets_cannot_do_twice_is_refused(refused):
    again = "a second backward before finish_gradient_synchronization"
    refused(2, again, train, BucketedDDP, twice, sent=True)
    refused(2, "got no gradient", train, BucketedDDP, finish_twice, sent=True)


def step_too_early(rank, world_size, has_finished):
    module = Heads()
    model, optimizer = BucketedDDP(module), torch.optim.SGD(module.parameters(), lr=1.0)
    use_all(model)
    if has_finished:
        model.finish_gradient_synchronization()
        optimizer.step()
        use_all(model)
    optimizer.step()


@pytest.mark.parametrize("has_finished", [False, True])
def test_a_step_without_finish_is_refused_the_last_one_too(refused, has_finished):
    words = "an optimizer's step after a backward without finish_gradient_synchronization"
    refused(2, words, step_too_early, has_finished, sent=True)


def step_by_closure(rank, world_size):
    model = BucketedDDP(nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure():
        loss = model(torch.full((1, 2), rank + 1.0)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def test_a_closure_that_does_not_finish_is_told_after_its_step(refused):
    refused(2, "without finish_gradient_synchronization", step_by_closure, sent=True)


def step_a_copy(rank, world_size, has_finished):
    """A deep copy in a group: its gradients are means, and its early step is refused."""
    torch.manual_seed(0)
    model = BucketedDDP(Heads(), group=dist.new_group([0, 1]))
    other = copy.deepcopy(model)
    (rank * other(torch.ones(1, 4))).sum().backward()
    if has_finished:
        other.finish_gradient_synchronization()
    torch.optim.SGD(other.parameters(), lr=1.0).step()
    return (model.module.first.bias - other.module.first.bias).item()


def test_a_copy_averages_by_itself_and_refuses_an_early_step(ranks, refused):
    assert ranks(2, step_a_copy, True).results == [0.5, 0.5]
    words = "an optimizer's step after a backward without finish_gradient_synchronization"
    refused(2, words, step_a_copy, False, sent=True)


def leave_out_on_rank_1(rank, world_size, wrapper):
    train(rank, world_size, wrapper, use_one if rank == 1 else use_all)


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_rank_that_leaves_a_parameter_out_is_the_one_that_raises(ranks, wrapper):
    says = "rank 1 raised RuntimeError: `second.weight` got no gradient"
    with pytest.raises(RankFailed, match=says):
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


def test_the_list_that_was_given_and_any_iterable_will_do():
    parameters = list(plain().parameters())
    again = list(parameters)
    buckets = into_buckets(again, 0)
    assert [p.shape for (p,) in buckets] == [p.shape for p in parameters[::-1]]
    assert list(map(id, again)) == list(map(id, parameters))
    assert into_buckets(iter(parameters), 25) and into_buckets([], 25) == []
