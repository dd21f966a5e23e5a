"""Parts, shares, traces and scripts that cannot be right are refused in one sentence."""

import os

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.ddp_buckets.experiments import finish_gradient_synchronization, shares
from mgpu_tutorial.ddp_in_practice import practice, train_ddp
from mgpu_tutorial.processes_and_ranks.meeting import free_port

WRAPPERS = [DistributedDataParallel, practice.AccumulatingDDP]


def sum_of_outputs(model, part):
    return model(part).sum() / len(part)


def sum_by_labels(model, part):
    samples, weights = part.values() if isinstance(part, dict) else part
    return (model(samples) * weights).sum() / len(samples)


def labelled_as(kind, part):
    both = {"samples": part, "weights": part[:, :1]}
    return both if kind is dict else kind(both.values())


def gradients_of(rank, world_size, sizes, wrapper=DistributedDataParallel, labelled=False):
    """The gradients of this rank's parts of the first 12 samples, of these sizes."""
    torch.manual_seed(0)
    model = wrapper(nn.Sequential(nn.Linear(3, 4), nn.Tanh()))
    samples = torch.linspace(-1, 1, 36).view(12, 3).tensor_split(world_size)[rank]
    parts, loss_of = samples[: sum(sizes)].split(sizes), sum_of_outputs
    if labelled:
        parts, loss_of = [labelled_as(labelled, part) for part in parts], sum_by_labels
    practice.accumulate(model, parts, loss_of)
    finish_gradient_synchronization(model)
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("kind", [tuple, list, dict])
@pytest.mark.parametrize("sizes", [[3, 3], [1, 5], [1, 2, 3]])
def test_a_part_counts_by_its_rows(ranks, sizes, kind):
    (whole,) = ranks(1, gradients_of, [12], labelled=tuple).results
    for found in ranks(2, gradients_of, sizes, labelled=kind).results:
        torch.testing.assert_close(found, whole)


def weigh(rank, world_size):
    """Means over tokens, of which the first part has one and the second three."""
    layer = nn.Linear(1, 1, bias=False)
    model = practice.AccumulatingDDP(layer)
    parts = [torch.tensor([[1.0, 0]]), torch.tensor([[2.0, 3, 4]])]

    def mean_of_tokens(model, part):
        tokens = part[part > 0]
        return model(tokens[:, None]).mean()

    practice.accumulate(model, parts, mean_of_tokens, weights=[1, 3])
    model.finish_gradient_synchronization()
    return layer.weight.grad.item()


def test_a_part_counts_by_the_weight_that_it_is_given(ranks):
    assert ranks(2, weigh).results == pytest.approx([2.5, 2.5])


@pytest.mark.parametrize("labelled", [False, tuple])
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
        model(torch.ones(1, 2)).sum().backward()
    model.finish_gradient_synchronization()


MISTAKES = {"all inside": "`weight`", "first outside": "a second backward"}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_no_sync_cannot_add_up_is_refused(refused, mistake):
    refused(2, MISTAKES[mistake], step_wrongly, mistake, sent=True)


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
    given = str(tmp_path), practice.accumulate, late
    refused(world_size, "that can be", practice.profile_step, *given)


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
