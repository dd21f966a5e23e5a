"""What the average, the weight of unequal shares and the kind of a mistake must be."""

from collections.abc import Callable

import torch
from torch import nn

from mgpu_tutorial.distributed_sgd import sgd
from mgpu_tutorial.lab.teach.build import Builder, expect, launch
from mgpu_tutorial.lab.teach.groups import expect_in_groups, in_two_groups

FIRST = {"weight": torch.tensor([[1.0, 10.0]]), "bias": torch.tensor([100.0])}


def _averaged(rank: int, world_size: int, average: Callable) -> dict[str, tuple]:
    """A linear layer after `average`; the gradients of rank r were 2r + 1 times FIRST."""
    model = nn.Linear(2, 1)
    for name, parameter in model.named_parameters():
        nn.init.constant_(parameter, 7.0)
        parameter.grad = (2 * rank + 1) * FIRST[name]
    average(model)
    return {name: (p.grad, p.detach()) for name, p in model.named_parameters()}


def leaves_the_mean(average: Callable) -> None:
    """leave the mean of all ranks' gradients in .grad, and the parameters as they are"""
    for world_size in (1, 2, 3):
        for rank, layer in enumerate(launch(_averaged, world_size, average).results):
            for name, (gradient, parameter) in layer.items():
                who = f"rank {rank} of {world_size}: the gradient of the {name}"
                expect(gradient, FIRST[name] * world_size, who, within=1e-3)
                expect(parameter, torch.full_like(FIRST[name], 7.0), "the parameters")


def _average_ranks(rank: int, average: Callable) -> list[float]:
    layer = nn.Linear(1, 1, bias=False)
    layer.weight.grad = torch.full((1, 1), 10.0 * rank)
    average(layer)
    return layer.weight.grad[0].tolist()


def averages_in_groups(average: Callable) -> None:
    """average over the ranks of its group only, and divide by their number"""
    what = "the mean of ten times the rank"
    expect_in_groups(average, _average_ranks, what, even=[10.0], odd=[20.0])


def sends_each_once(average: Callable) -> None:
    """send each gradient once"""
    events = launch(_averaged, 2, average, trace=True).events
    sent = sum(event.nbytes for event in events if event.rank == 0)
    assert sent == 12, f"of 3 gradients of 4 bytes rank 0 sends {sent} bytes, expected 12"


def _epoch_with(rank: int, world_size: int, name: str, function: Callable) -> torch.Tensor:
    """The parameters after an epoch of four steps, whose last batch is one sample."""
    setattr(sgd, name, function)  # in this rank only
    return sgd.train(rank, world_size, epochs=1, batch=479, lr=0.1)[1]


def _expect_one_process(name: str, function: Callable) -> None:
    (one,) = launch(_epoch_with, 1, name, getattr(sgd, name)).results
    for world_size in (2, 3):
        results = launch(_epoch_with, world_size, name, function).results
        far = max((result - one).abs().max().item() for result in results)
        assert far < 1e-6, f"{world_size} ranks end {far:.0e} away from one process"
        apart = [r for r, other in enumerate(results) if not torch.equal(other, results[0])]
        assert not apart, f"of {world_size} ranks, {apart} have other bits than rank 0"


def keeps_the_ranks_equal(average: Callable) -> None:
    """make an epoch on 2 and 3 ranks end where one process ends, with the same bits on all"""
    _expect_one_process("average_gradients", average)


def _loss_with(rank: int, world_size: int, loss_of: Callable, samples: int) -> float | None:
    """This rank's loss, after its backward; sample i of the batch has a loss of i + 1."""
    losses = torch.arange(1.0, samples + 1).tensor_split(world_size)[rank]
    output = -losses[:, None].repeat(1, 10).requires_grad_()
    loss = loss_of(output, torch.zeros(len(losses), dtype=torch.int64), samples)
    if loss is not None:
        loss.backward()
        return float(loss)


def averages_to_the_mean(loss_of: Callable) -> None:
    """average to the mean of all losses, also of unequal shares, and where a rank has none"""
    for ranks, samples, shares in ((1, 7, "7"), (2, 7, "4 and 3"), (2, 1, "1 and 0")):
        losses = launch(_loss_with, ranks, loss_of, samples).results
        assert None not in losses, "nothing was returned. Is a `return` missing?"
        what = f"losses 1 to {samples} in shares of {shares} samples: the ranks' average"
        expect(sum(losses) / ranks, (samples + 1) / 2, what, within=1e-5)


def _loss_in_group(rank: int, loss_of: Callable) -> float:
    """Four ranks in two groups; of a batch of 4 samples this rank has one, of loss rank."""
    output = torch.full((1, 10), -float(rank))
    return float(loss_of(output, torch.tensor([0]), 4))


def _loss_of_logits(rank: int, world_size: int, loss_of: Callable) -> float:
    def one_more(output: torch.Tensor, labels: torch.Tensor, reduction: str) -> torch.Tensor:
        assert reduction == "sum", f'loss_of is called with reduction="{reduction}"'
        return output.sum() + len(output)

    output, labels = torch.full((1, 10), rank / 10), torch.tensor([0])
    return float(loss_of(output, labels, 2, loss_of=one_more))


def takes_loss_and_group(loss_of: Callable) -> None:
    """use the loss that it is given, which adds up, and the number of ranks of its group"""
    what = "of a batch of 4 one sample, whose loss is the rank: 2 ranks · loss / 4"
    for rank, found in enumerate(launch(in_two_groups, 4, loss_of, _loss_in_group).results):
        expect(found, rank / 2, f"groups {{0, 2}} and {{1, 3}}, rank {rank}, {what}")
    given = launch(_loss_of_logits, 2, loss_of).results
    expect(
        given, [1.0, 2.0], "with loss_of=… that gives 1 on rank 0, 2 on rank 1: the losses"
    )


def trains_like_one(loss_of: Callable) -> None:
    """make an epoch on 2 and 3 ranks end where one process ends"""
    _expect_one_process("shared_loss", loss_of)


RIGHT = torch.tensor([[3.0, 0.0], [0.0, 4.0]])  # of length 5
OTHER = torch.tensor([[0.0, 1.0], [-1.0, 0.0]])


def _expect_kind(kind_of: Callable, ranks: list, expected: str, what: str) -> None:
    found = kind_of(ranks, RIGHT, 0.01)
    assert found == expected, f"{what}: {found!r}, expected {expected!r}"


def calls_right(kind_of: Callable) -> None:
    """call gradients right if each rank's is within the limit, and only then"""
    for ranks in (1, 2, 3):
        what = f"{ranks} ranks with the gradient of one process"
        _expect_kind(kind_of, [RIGHT.clone() for _ in range(ranks)], "right", what)
    near = RIGHT + 0.004 * OTHER, RIGHT - 0.004 * OTHER
    _expect_kind(kind_of, [*near], "right", "two ranks, each less than the limit off")
    _expect_kind(kind_of, [RIGHT, 2 * OTHER], "another direction", "rank 0 right, rank 1 not")


def calls_never_averaged(kind_of: Callable) -> None:
    """call gradients never averaged if the mean of all ranks would be right"""
    for ranks in ([RIGHT + OTHER, RIGHT - OTHER], [RIGHT, RIGHT + OTHER, RIGHT - OTHER]):
        what = f"{len(ranks)} ranks whose mean is right"
        _expect_kind(kind_of, ranks, "never averaged", what)


def calls_a_factor(kind_of: Callable) -> None:
    """name the factor of gradients that have the right direction, whatever its sign"""
    for factor in (2, 0.5, 4, -1):
        ranks, what = [factor * RIGHT] * 2, f"{factor:g} times the right gradient"
        _expect_kind(kind_of, ranks, f"{factor:g} times as long", what)


def calls_another_direction(kind_of: Callable) -> None:
    """call all else another direction, and what is not a number too"""
    _expect_kind(kind_of, [RIGHT + OTHER] * 2, "another direction", "turned, on both ranks")
    strange = torch.full_like(RIGHT, torch.nan)
    _expect_kind(kind_of, [strange] * 2, "another direction", "nan on both ranks")


build = Builder(
    "distributed_sgd",
    {
        sgd.average_gradients: [
            leaves_the_mean,
            sends_each_once,
            averages_in_groups,
            keeps_the_ranks_equal,
        ],
        sgd.shared_loss: [averages_to_the_mean, takes_loss_and_group, trains_like_one],
        sgd.kind_of: [
            calls_right,
            calls_never_averaged,
            calls_a_factor,
            calls_another_direction,
        ],
    },
)
