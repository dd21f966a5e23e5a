"""What the reader's accumulation must do, and the wrapper under it."""

from collections.abc import Callable
from contextlib import nullcontext, suppress

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_in_practice.figures import count_buckets
from mgpu_tutorial.ddp_in_practice.practice import AccumulatingDDP, accumulate, step_in_parts
from mgpu_tutorial.lab.teach.build import Builder, expect, launch

SAMPLES = 24


def how_often(model: nn.Module, part: torch.Tensor) -> torch.Tensor:
    """A loss whose mean gradient over the whole batch counts each sample once."""
    return SAMPLES * model(part).mean()


def _counts(
    rank: int,
    world_size: int,
    method: Callable,
    wrapper: type[nn.Module],
    micro: int,
    in_two_groups: bool = False,
) -> torch.Tensor:
    """How often each sample of a batch of 24 counts in this rank's gradient.

    Sample i is all zeros but for a one at place i, and the model is one row of weights, so
    the gradient of weight i says how often sample i counts. In two groups, the even ranks
    and the odd ones have a batch each.
    """
    ranks, group = list(range(world_size)), None
    if in_two_groups:
        groups = [dist.new_group(ranks[first::2]) for first in (0, 1)]
        ranks, group = ranks[rank % 2 :: 2], groups[rank % 2]
    row = nn.Linear(SAMPLES, 1, bias=False)
    ours = {"group": group} if wrapper is not DistributedDataParallel else {}
    model = wrapper(row, **ours)
    share = torch.eye(SAMPLES).tensor_split(len(ranks))[ranks.index(rank)]
    for _ in range(2):
        model.zero_grad()
        method(model, share.tensor_split(micro), how_often)
        getattr(model, "finish_gradient_synchronization", lambda: None)()
    return torch.zeros(SAMPLES) if row.weight.grad is None else row.weight.grad[0]


def _expect_each_once(found: list[torch.Tensor], where: str) -> None:
    for rank, counts in enumerate(found):
        who = f"{where}, rank {rank}: in its gradient"
        if len(set(counts.tolist())) == 1:
            times = f"{who} every sample counts {counts[0]:g} times, expected once"
            assert abs(counts[0] - 1) < 1e-4, times
        for i, count in enumerate(counts.tolist()):
            times = f"sample {i} counts {count:g} times, expected once"
            assert abs(count - 1) < 1e-4, f"{who} {times}"
        assert torch.equal(counts, found[0]), f"{who} other bits than in rank 0's"


def counts_each_sample_once(function: Callable) -> None:
    """leave the gradient of the whole batch on 1, 2 and 3 ranks, the same bits on each"""
    for world_size, micro in (1, 2), (2, 1), (3, 4):
        report = launch(_counts, world_size, function, DistributedDataParallel, micro)
        _expect_each_once(report.results, f"{world_size} ranks, parts: {micro}")


def weighs_unequal_parts(function: Callable) -> None:
    """count each sample once in parts of 3, 3, 2, 2 and 2 samples too"""
    results = launch(_counts, 2, function, DistributedDataParallel, 5).results
    _expect_each_once(results, "2 ranks, unequal parts")


def _calls(function: Callable, micro: int, wrapper: type[nn.Module]) -> int:
    return count_buckets(launch(step_in_parts, 2, function, micro, wrapper, trace=True))


def sends_once(function: Callable) -> None:
    """send each of the six buckets once, in three parts as in one"""
    for micro, said in ((1, "one part"), (3, "three parts")):
        calls = _calls(function, micro, DistributedDataParallel)
        expect(calls, 6, f"with {said}, the buckets that DDP sends")


def keeps_one_part(function: Callable) -> None:
    """keep the activations of one part at a time"""
    whole, third = (launch(step_in_parts, 2, function, micro).results[0] for micro in (1, 3))
    expect(third, whole // 3, "the bytes kept for backward in 3 parts")


def _at_once(model: nn.Module, parts: list[torch.Tensor], loss_of: Callable) -> None:
    loss_of(model, torch.cat(parts)).backward()


def sends_after_the_last(wrapper: type[nn.Module]) -> None:
    """send nothing inside no_sync, and each of the seven buckets once after it"""
    expect(_calls(accumulate, 3, wrapper), 7, "in three parts, the calls of a step")
    expect(_calls(_at_once, 3, wrapper), 7, "without no_sync, the calls of a step")


def adds_up(wrapper: type[nn.Module]) -> None:
    """leave the gradient of the whole batch on 1, 2 and 3 ranks, and in two groups of two"""
    for world_size, micro in (1, 2), (2, 3), (3, 4):
        results = launch(_counts, world_size, accumulate, wrapper, micro).results
        _expect_each_once(results, f"{world_size} ranks, parts: {micro}")
    results = launch(_counts, 4, accumulate, wrapper, 3, in_two_groups=True).results
    _expect_each_once(results, "groups {0, 2} and {1, 3}, parts: 3")


def _after_an_error(rank: int, world_size: int, wrapper: type[nn.Module]) -> float:
    """A gradient of 2 on rank 0 and 4 on rank 1, after an error inside no_sync."""
    line = nn.Linear(1, 1, bias=False)
    model = wrapper(line)
    try:
        with model.no_sync():
            raise StopIteration("the data are at their end")
    except StopIteration:
        pass
    model(torch.full((1, 1), 2.0 + 2 * rank)).sum().backward()
    with suppress(RuntimeError, AssertionError):  # it may say that nothing was sent
        model.finish_gradient_synchronization()
    return line.weight.grad.item()


def sends_after_an_error(wrapper: type[nn.Module]) -> None:
    """let an error out of no_sync, and send in the next backward"""
    results = launch(_after_an_error, 2, wrapper).results
    expect(results, [3.0, 3.0], "after an error in no_sync, the means of 2 and 4")


def _go_backward_again(
    rank: int, world_size: int, wrapper: type[nn.Module], inside: bool
) -> str:
    """The error of a second backward before finish, inside no_sync or outside of it."""
    model = wrapper(nn.Linear(4, 4))
    loss = model(torch.ones(1, 4)).sum()
    loss.backward(retain_graph=True)
    try:
        with model.no_sync() if inside else nullcontext():
            loss.backward()
    except Exception as error:
        return str(error) or "an error without a word"
    finally:
        dist.barrier()  # what is on its way arrives
    return ""


def refuses_to_add_to_what_left(wrapper: type[nn.Module]) -> None:
    """raise an error in a second backward, inside no_sync too, once the buckets have left"""
    for inside in (False, True):
        for rank, said in enumerate(launch(_go_backward_again, 2, wrapper, inside).results):
            where = "inside no_sync" if inside else "outside of no_sync"
            what = f"its buckets have left, a second backward began {where}"
            assert said, f"{what}, and rank {rank} said nothing"


build = Builder(
    "ddp_in_practice",
    {
        accumulate: [
            sends_once,
            counts_each_sample_once,
            keeps_one_part,
            weighs_unequal_parts,
        ],
        AccumulatingDDP: [
            sends_after_the_last,
            adds_up,
            sends_after_an_error,
            refuses_to_add_to_what_left,
        ],
    },
)
