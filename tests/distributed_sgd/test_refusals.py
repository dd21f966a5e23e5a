"""What cannot be averaged is refused before anything is sent; a frozen layer is left out."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, nll_loss

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
    refused(2, "1 of 3 parameters have no gradient on this rank", average, "unused")


def test_a_layer_that_one_rank_does_not_use_is_named_by_that_rank(ranks):
    with pytest.raises(RankFailed, match="1 of 3 parameters have no gradient on this rank"):
        ranks(2, average, "once")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", ["plain", "frozen", "half"])
def test_the_mean_is_right_and_what_is_frozen_stays_without_gradient(ranks, world_size, kind):
    mean = 1.0 if world_size == 1 else 1.5
    first = None if kind == "frozen" else [mean] * 4
    expected = [first, [2 * mean] * 2, [mean]]
    assert ranks(world_size, average, kind).results == [expected] * world_size


def average_of_another_layout(rank, world_size):
    layer = nn.Conv2d(2, 2, 2)
    gradient = torch.arange(16.0).reshape(2, 2, 2, 2)
    layout = torch.channels_last if rank else torch.contiguous_format
    layer.weight.grad = gradient.to(memory_format=layout)
    layer.bias.grad = torch.ones(2)
    sgd.average_gradients(layer)
    return layer.weight.grad.flatten().tolist()


def test_numbers_that_lie_in_another_order_on_one_rank_meet_their_own(ranks):
    expected = [float(i) for i in range(16)]
    assert ranks(2, average_of_another_layout).results == [expected] * 2


def average_in_float16(rank, world_size):
    layer = nn.Linear(2, 1, bias=False).half()
    layer.weight.grad = torch.full_like(layer.weight, 40_000)
    sgd.average_gradients(layer)
    return layer.weight.grad.tolist()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_mean_stays_where_the_sum_of_float16_would_be_infinite(ranks, world_size):
    expected = [[40_000.0, 40_000.0]]
    assert ranks(world_size, average_in_float16).results == [expected] * world_size


def loss(rank, world_size, batch):
    output = torch.zeros(3, 10, requires_grad=True)
    return sgd.shared_loss(output, torch.zeros(3, dtype=torch.int64), batch).item()


@pytest.mark.parametrize("batch", [0, 2, -4])
def test_a_batch_that_is_smaller_than_a_share_is_refused(refused, batch):
    refused(2, f"a batch of {batch} is less than this rank's 3 samples", loss, batch)


def loss_of_an_ignored_label(rank, world_size, label):
    loss_of = partial(cross_entropy, ignore_index=label)
    sgd.shared_loss(torch.zeros(2, 3), torch.tensor([0, label]), 4, loss_of)


@pytest.mark.parametrize("label", [-100, -1, 255])
def test_a_label_that_counts_in_no_loss_is_refused(refused, label):
    """The mean of one process leaves it out; a sum divided by the whole batch would not."""
    refused(2, f"a label of {label} ", loss_of_an_ignored_label, label)


WEIGHT = torch.arange(1.0, 4.0)
LOSSES = {
    "ignored": partial(cross_entropy, ignore_index=0),
    "ignored, the last": partial(nll_loss, ignore_index=2),
    "weighted": partial(cross_entropy, weight=WEIGHT),
    "weighted nll": partial(nll_loss, weight=WEIGHT),
    "weighted in the middle": partial(cross_entropy, weight=torch.tensor([1.0, 0.5, 1.0])),
}


def loss_by(rank, world_size, name):
    """The share has one class only, which counts once."""
    labels = torch.ones(2, dtype=torch.int64)
    sgd.shared_loss(torch.zeros(2, 3), labels, 4, LOSSES[name])


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_counts_classes_otherwise_is_refused_whatever_the_share(refused, name):
    refused(2, "leave weight and ignore_index out", loss_by, name)


def loss_of_a_module(rank, world_size):
    scores, labels = torch.ones(2, 3), torch.tensor([0, 1])
    sgd.shared_loss(scores, labels, 4, nn.CrossEntropyLoss(reduction="sum"))


def test_a_loss_that_is_a_module_is_refused(refused):
    refused(2, "CrossEntropyLoss takes its reduction when it is made", loss_of_a_module)


def loss_of_rows(rank, world_size):
    sgd.shared_loss(torch.zeros(2, 8), torch.ones(2, 8), 4, mse_loss)


def loss_of_sequences(rank, world_size):
    labels = torch.ones(2, 6, dtype=torch.int64)
    sgd.shared_loss(torch.zeros(2, 3, 6), labels, 4, cross_entropy)


def test_a_mean_over_the_tokens_of_a_sample_is_refused(refused):
    words = "mean of this loss over labels (2, 6) is 1.099, and its sum over 2 samples 13.18"
    refused(2, words, loss_of_sequences)


def loss_of_many(rank, world_size, loss_of, dtype=torch.float32):
    output = torch.zeros(2, 200, dtype=dtype)
    sgd.shared_loss(output, torch.tensor([3, 50]), 4, loss_of)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_ignored_class_in_the_middle_of_many_is_refused(refused, dtype):
    loss_of = partial(cross_entropy, ignore_index=50)
    words = "a sample of class 50 adds 0 to this loss"
    refused(2, words, loss_of_many, loss_of, dtype)


MANY = 5000  # classes, of which the middle is not tried
HEAVY = torch.ones(MANY).index_fill(0, torch.tensor(2000), 0.1)


def loss_of_a_vocabulary(rank, world_size, given):
    labels = torch.tensor([3, 2000])
    sgd.shared_loss(torch.zeros(2, MANY), labels, 4, partial(cross_entropy, **given))


@pytest.mark.parametrize("given", [{"ignore_index": 2000}, {"weight": HEAVY}])
def test_a_class_deep_inside_a_vocabulary_is_not_left_out(refused, given):
    refused(2, "leave weight and ignore_index out", loss_of_a_vocabulary, given)


def weigh_in_place(rank, world_size):
    weight = torch.ones(3)
    loss_of = partial(cross_entropy, weight=weight)
    for _ in range(2):
        sgd.shared_loss(torch.zeros(2, 3), torch.tensor([0, 1]), 4, loss_of)
        weight[1] = 5


def test_weights_that_change_in_place_are_seen(refused):
    refused(2, "leave weight and ignore_index out", weigh_in_place)


class Weighed:
    """A loss whose weights may change from step to step."""

    weight = None

    def __call__(self, output, labels, reduction="mean"):
        return cross_entropy(output, labels, weight=self.weight, reduction=reduction)


def weigh_later(rank, world_size):
    loss_of, given = Weighed(), (torch.zeros(2, 3), torch.tensor([0, 1]), 4)
    sgd.shared_loss(*given, loss_of)
    loss_of.weight = WEIGHT
    sgd.shared_loss(*given, loss_of)


def test_a_loss_that_changes_between_steps_is_tried_again(refused):
    refused(2, "leave weight and ignore_index out", weigh_later)


def loss_in_16_bits(rank, world_size):
    loss_of = partial(cross_entropy, ignore_index=1)
    output = torch.zeros(2, 64, dtype=torch.bfloat16)
    sgd.shared_loss(output, torch.zeros(2, dtype=torch.int64), 4, loss_of)


def test_an_ignored_class_of_many_is_refused_in_16_bits_too(refused):
    refused(2, "a sample of class 1 adds 0 to this loss", loss_in_16_bits)


def test_a_mean_over_the_numbers_of_a_sample_is_refused(refused):
    words = "mean of this loss over labels (2, 8) is 1, and its sum over 2 samples 16: let"
    refused(2, words, loss_of_rows)


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


@pytest.mark.parametrize("epochs", [0])
def test_no_epochs_are_refused(refused, epochs):
    refused(2, f"epochs={epochs} trains nothing", sgd.train, epochs)


@pytest.mark.parametrize("lr", [float("nan"), float("inf"), 0, -0.1, "0.1"])
def test_a_step_has_a_length(refused, lr):
    refused(2, f"lr={lr!r}: expected a number above 0", sgd.train, 1, 128, lr)


def average_for_others(rank, world_size):
    groups = [dist.new_group([r]) for r in range(world_size)]
    layer = nn.Linear(1, 1)
    layer(torch.ones(1, 1)).sum().backward()
    sgd.average_gradients(layer, group=groups[1 - rank])


def test_a_group_without_this_rank_is_refused(ranks):
    with pytest.raises(RankFailed, match="rank 1 isn't in the group that it was given"):
        ranks(2, average_for_others)


@pytest.mark.slow
def test_fewer_epochs_than_are_done_are_refused_and_as_many_are_those(
    ranks, refused, tmp_path
):
    run = 2, 479, 0.1, str(tmp_path / "run.pt")
    losses, parameters = ranks(2, sgd.train, *run).results[0]
    for epochs in (1, -1):  # the file has to be read to say so
        refused(2, f"epochs={epochs}, and 2 are done", sgd.train, epochs, *run[1:], sent=True)
    again, same = ranks(1, sgd.train, *run).results[0]
    assert again == losses and torch.equal(same, parameters)
