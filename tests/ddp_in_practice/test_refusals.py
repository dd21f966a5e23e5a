"""Parts, shares, traces and scripts that cannot be right are refused in one sentence."""

import os

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.experiments import finish_gradient_synchronization, shares
from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP, NaiveDDP
from mgpu_tutorial.ddp_in_practice import practice, train_ddp
from mgpu_tutorial.processes_and_ranks.meeting import free_port

WRAPPERS = [DistributedDataParallel, practice.AccumulatingDDP]


def sum_of_outputs(model, part):
    return model(part).sum() / len(part)


def sum_by_labels(model, part):
    samples, weights = part
    return (model(samples) * weights).sum() / len(samples)


def gradients_of(rank, world_size, sizes, wrapper=DistributedDataParallel, labelled=False):
    """The gradients of this rank's parts of the first 12 samples, of these sizes."""
    torch.manual_seed(0)
    model = wrapper(nn.Sequential(nn.Linear(3, 4), nn.Tanh()))
    samples = torch.linspace(-1, 1, 36).view(12, 3).tensor_split(world_size)[rank]
    parts, loss_of = samples[: sum(sizes)].split(sizes), sum_of_outputs
    if labelled:
        parts, loss_of = [(part, part[:, :1]) for part in parts], sum_by_labels
    practice.accumulate(model, parts, loss_of)
    finish_gradient_synchronization(model)
    return [p.grad for p in model.parameters()]


def no_parts(rank, world_size):
    practice.accumulate(DistributedDataParallel(nn.Linear(3, 1)), [], sum_of_outputs)


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("sizes", [[3, 2], [1, 1, 0], [0], [0, 0], [2, 2, 1]])
def test_parts_whose_mean_is_not_that_of_the_batch_are_refused(refused, sizes, labelled):
    call = gradients_of, sizes, DistributedDataParallel, labelled
    refused(2, f"parts of {sizes} samples", *call, sent=True)


def test_a_batch_without_parts_is_refused(refused):
    refused(2, "parts of [] samples", no_parts, sent=True)


def accumulate_sizes(rank, world_size, sizes, wrapper):
    model = wrapper(nn.Linear(3, 1))
    parts = [torch.ones(size, 3) for size in sizes[rank]]
    practice.accumulate(model, parts, sum_of_outputs)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("second", [[1, 1], [3], [0, 0], []])
def test_ranks_with_unequal_shares_are_refused_on_both(refused, second, wrapper):
    """The mean of the ranks would weigh a sample of the smaller share more."""
    words = f"samples of each part: [3, 3] on rank 0 and {second} on rank 1"
    refused(2, words, accumulate_sizes, [[3, 3], second], wrapper, sent=True)


def accumulate_inside(rank, world_size):
    model = DistributedDataParallel(nn.Linear(3, 1))
    with model.no_sync():
        practice.accumulate(model, [torch.ones(2, 3)] * 2, sum_of_outputs)


def test_parts_inside_no_sync_would_never_be_averaged(refused):
    words = "inside no_sync, so no part would be averaged: call accumulate outside"
    refused(2, words, accumulate_inside, sent=True)


def accumulate_ignored(rank, world_size):
    model, labels = practice.AccumulatingDDP(nn.Linear(3, 2)), torch.tensor([0, -100])
    practice.accumulate(model, [(torch.ones(2, 3), labels)], sum_by_labels)


def test_a_label_that_counts_in_no_mean_is_refused(refused):
    refused(2, "a label of -100 does not count in the mean", accumulate_ignored, sent=True)


def accumulate_others(rank, world_size, part):
    model = practice.AccumulatingDDP(nn.Linear(3, 1))
    practice.accumulate(model, [part] * 2, sum_of_outputs)


@pytest.mark.parametrize(
    "kind, part",
    [
        ("dict", {"x": torch.ones(2, 3)}),
        ("str", "images.pt"),
        ("list of str", ["1.png", "2.png"]),
        ("tuple of str", ("1.png", torch.ones(2))),
        ("list of int", [1, 2, 3]),
        ("tuple", ()),
        ("int", 3),
    ],
)
def test_a_part_that_is_no_tensor_is_refused(refused, kind, part):
    words = f"a part is a {kind}: expected a tensor, or a tuple"
    refused(2, words, accumulate_others, part, sent=True)


def gradient_of_a_generator(rank, world_size, wrapper):
    model = wrapper(nn.Linear(1, 1, bias=False))
    practice.accumulate(
        model, (torch.full((2, 1), i + rank) for i in (1.0, 3.0)), sum_of_outputs
    )
    finish_gradient_synchronization(model)
    return model.module.weight.grad.item()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_parts_can_come_from_a_generator(ranks, wrapper):
    assert ranks(2, gradient_of_a_generator, wrapper).results == [2.5, 2.5]


@pytest.mark.parametrize("wrapper", [NaiveDDP, BucketedDDP])
def test_a_wrapper_that_cannot_wait_is_refused(refused, wrapper):
    words = f"{wrapper.__name__} has no no_sync, so it can't wait for the last part"
    refused(2, words, gradients_of, [2, 2], wrapper, sent=True)


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("world_size, parts", [(1, 1), (1, 12), (2, 3), (3, 4)])
def test_equal_parts_give_the_gradients_of_the_whole_batch(
    ranks, world_size, parts, wrapper, labelled
):
    (whole,) = ranks(1, gradients_of, [12], labelled=labelled).results
    sizes = [12 // world_size // parts] * parts
    for found in ranks(world_size, gradients_of, sizes, wrapper, labelled).results:
        torch.testing.assert_close(found, whole)


def step_wrongly(rank, world_size, mistake):
    """Two backwards of a layer, both inside no_sync, or only the second, and finish."""
    model = practice.AccumulatingDDP(nn.Linear(2, 1))
    if mistake == "first outside":
        model(torch.ones(1, 2)).sum().backward()
    with model.no_sync():
        with model.no_sync():
            pass
        model(torch.ones(1, 2)).sum().backward()
    model.finish_gradient_synchronization()


MISTAKES = {
    "all inside": "`weight` has a gradient that was never sent, because each backward",
    "first outside": "a second backward before finish_gradient_synchronization",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_no_sync_cannot_add_up_is_refused(refused, mistake):
    refused(2, MISTAKES[mistake], step_wrongly, mistake, sent=True)


def step_on_sums(rank, world_size):
    layer = nn.Linear(2, 1)
    model, optimizer = practice.AccumulatingDDP(layer), torch.optim.SGD(layer.parameters(), 1)
    with model.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_a_step_after_no_sync_alone_is_refused(refused):
    words = "an optimizer's step after a backward without finish_gradient_synchronization"
    refused(2, words, step_on_sums, sent=True)


@pytest.mark.parametrize("rank, world_size", [(0, 5), (0, 48), (2, 2), (-1, 2), (0, 0)])
def test_shares_that_are_not_equal_are_refused(rank, world_size):
    with pytest.raises(ValueError, match="has no equal share of 24 samples"):
        shares(rank, world_size, 1, 4)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 8, 12, 24])
def test_the_shares_are_the_whole_batch(world_size):
    parts = [shares(rank, world_size, 2, 4) for rank in range(world_size)]
    for step, whole in enumerate(shares(0, 1, 2, 4)):
        assert torch.equal(torch.cat([part[step] for part in parts]), whole)


@pytest.mark.parametrize("world_size, late", [(1, 0.1), (2, -0.1)])
def test_a_delay_that_cannot_be_is_refused(refused, tmp_path, world_size, late):
    refused(world_size, "that can be", practice.profile_step, str(tmp_path), late)


@pytest.mark.parametrize("intervals", [[(1, 0)], [(0, 9), (4, 3)]])
def test_an_interval_that_ends_before_it_begins_is_refused(intervals):
    with pytest.raises(ValueError, match="before it begins at"):
        practice.union_length(intervals)


def run_script(rank, world_size, port, batch):
    here = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    node = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}
    os.environ.update(here | node)
    train_ddp.main(batch=batch)


def test_the_script_refuses_a_batch_that_does_not_divide(ranks):
    report = ranks(2, said_by_script, free_port(), 121, backend="none", device="cpu")
    assert report.results == ["a batch of 121 does not divide by 2 ranks"] * 2


def said_by_script(rank, world_size, port, batch):
    try:
        run_script(rank, world_size, port, batch)
    except ValueError as error:
        return str(error)


def test_the_script_says_that_torchrun_has_to_start_it(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(RuntimeError, match="start this script with torchrun"):
        train_ddp.main()
