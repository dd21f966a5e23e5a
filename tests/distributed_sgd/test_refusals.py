"""What cannot be averaged is refused before anything is sent; a frozen layer is left out."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from mgpu_tutorial.distributed_sgd import sgd
from mgpu_tutorial.lab import RankFailed


def average(rank, world_size, kind):
    """The averaged gradients; rank r's loss is r + 1 times the sum of the outputs."""
    first, second = nn.Linear(2, 2, bias=False), nn.Linear(2, 1)
    model = nn.Sequential(first, second)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    output = (second if kind == "unused" or (kind == "once" and rank) else model)(
        torch.ones(1, 2)
    )
    if kind == "frozen":
        first.requires_grad_(False)
        output = model(torch.ones(1, 2))
    if kind == "half":
        model.bfloat16()
        output = model(torch.ones(1, 2, dtype=torch.bfloat16))
    ((rank + 1) * output.sum()).backward()
    sgd.average_gradients(model)
    return [
        p.grad if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()
    ]


def test_a_layer_that_no_rank_uses_is_refused_before_anything_is_sent(refused):
    refused(2, RuntimeError("`0.weight`"), average, "unused")


def test_a_layer_that_one_rank_does_not_use_is_named_by_that_rank(ranks):
    with pytest.raises(RankFailed, match="rank 1 raised RuntimeError: `0.weight`"):
        ranks(2, average, "once")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "frozen", "half"])
def test_the_mean_is_right_and_what_is_frozen_stays_without_gradient(ranks, world_size, kind):
    mean = 1.0 if world_size == 1 else 1.5
    first = None if kind == "frozen" else [mean] * 4
    expected = [first, [2 * mean] * 2, [mean]]
    assert ranks(world_size, average, kind).results == [expected] * world_size


def test_a_mean_is_one_message_for_each_parameter_and_no_more(ranks):
    report = ranks(2, average, "frozen", trace=True)
    assert [event.op for event in report.events if event.rank == 0] == ["all_reduce"] * 2


def average_in_float16(rank, world_size):
    layer = nn.Linear(2, 1, bias=False).half()
    layer.weight.grad = torch.full_like(layer.weight, 40_000)
    sgd.average_gradients(layer)
    return layer.weight.grad.tolist()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_mean_stays_where_the_sum_of_float16_would_be_infinite(ranks, world_size):
    expected = [[40_000.0, 40_000.0]]
    assert ranks(world_size, average_in_float16).results == [expected] * world_size


def mean_of_each(output, labels, reduction):
    rows = mse_loss(output, labels, reduction="none").flatten(1).mean(1)
    return getattr(rows, reduction)()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("loss_of", [mean_of_each, cross_entropy, mse_loss])
def test_labels_that_are_fractions_give_the_loss_of_one_process(ranks, loss_of, dtype):
    torch.manual_seed(0)
    size = () if loss_of is mse_loss else (3,)
    output, labels = torch.rand(2, 5, *size).to(dtype).unbind()
    found = sum(ranks(2, shared_loss_of, output, labels, loss_of).results) / 2
    assert found == pytest.approx(loss_of(output, labels, reduction="mean").item(), rel=1e-2)


def shared_loss_of(rank, world_size, output, labels, loss_of):
    mine = [part.tensor_split(world_size)[rank] for part in (output, labels)]
    return sgd.shared_loss(*mine, len(labels), loss_of).item()


@pytest.mark.slow
def test_fewer_epochs_than_are_done_are_refused_and_as_many_are_those(
    ranks, refused, tmp_path
):
    run = 2, 479, 0.1, str(tmp_path / "run.pt")
    losses, parameters = ranks(2, sgd.train, *run).results[0]
    for epochs in (1, -1):  # the file has to be read to say so
        refused(2, ValueError(f"epochs={epochs}"), sgd.train, epochs, *run[1:], sent=True)
    again, same = ranks(1, sgd.train, *run).results[0]
    assert again == losses and torch.equal(same, parameters)
