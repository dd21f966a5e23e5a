"""What `average_gradients` and the weight of unequal shares must do, on real ranks."""

from collections.abc import Callable

import torch
from torch import nn

from mgpu_tutorial.distributed_sgd import sgd, training
from mgpu_tutorial.lab.teach.build import Builder, expect, launch

# average_gradients


def _averaged(rank: int, world_size: int, average: Callable) -> tuple[list, list]:
    """The gradients and the parameters of a linear layer after `average`.

    Before it, the gradients of rank r are 2r + 1 times 1, 10 and 100.
    """
    model = nn.Linear(2, 1)
    for parameter, first in zip(model.parameters(), ([[1.0, 10.0]], [100.0]), strict=True):
        nn.init.constant_(parameter, 7.0)
        parameter.grad = (2 * rank + 1) * torch.tensor(first)
    average(model)
    parameters = list(model.parameters())
    return [p.grad for p in parameters], [p.detach() for p in parameters]


def leaves_the_mean(average: Callable) -> None:
    """leave the mean of all ranks' gradients in .grad, for weight and bias"""
    own = torch.tensor([[1.0, 10.0]])  # rank 0's, which is the mean on one rank only
    for world_size in (1, 2, 3):
        results = launch(_averaged, world_size, average).results
        assert world_size == 1 or not torch.equal(results[0][0][0], own), (
            f"on {world_size} ranks .grad is still each rank's own: change it in place"
        )
        for rank, (gradients, _) in enumerate(results):
            who = f"rank {rank} of {world_size}: the gradient of the"
            expect(gradients[0], own * world_size, f"{who} weight", within=1e-3)
            bias = torch.tensor([100.0 * world_size])
            expect(gradients[1], bias, f"{who} bias", within=1e-3)


def leaves_the_parameters(average: Callable) -> None:
    """leave the parameters as they are"""
    for _, parameters in launch(_averaged, 2, average).results:
        expect(parameters, [torch.full((1, 2), 7.0), torch.tensor([7.0])], "the parameters")


def _steps_with(rank: int, world_size: int, average: Callable) -> torch.Tensor:
    """Three steps of the lesson's loop with another way to average."""
    sgd.average_gradients = average  # in this rank only
    return sgd.take_steps(rank, world_size, steps=3)


def takes_the_steps_of_one(average: Callable) -> None:
    """make 2 and 4 ranks take the steps of one process, with the same bits on every rank"""
    _expect_near(_steps_with, (2, 4), average, sgd.average_gradients)


def _expect_near(worker: Callable, ranks: tuple, function: Callable, ours: Callable) -> None:
    """With this function some ranks end where one process does with ours."""
    (one,) = launch(worker, 1, ours).results
    for world_size in ranks:
        results = launch(worker, world_size, function).results
        far = max((result - one).abs().max().item() for result in results)
        assert far < 1e-6, f"{world_size} ranks end {far:.0e} away from one process"
        apart = [r for r, other in enumerate(results) if not torch.equal(other, results[0])]
        assert not apart, f"of {world_size} ranks, {apart} have other bits than rank 0"


# shared_loss


def _loss_with(
    rank: int, world_size: int, loss_of: Callable, samples: int
) -> tuple[float, bool] | None:
    """This rank's loss where sample i of the batch has a loss of i + 1; can it go back?"""
    losses = torch.arange(1.0, samples + 1).tensor_split(world_size)[rank]
    output = -losses[:, None].repeat(1, 10).requires_grad_()
    loss = loss_of(output, torch.zeros(len(losses), dtype=torch.int64), samples)
    if loss is not None:
        return float(loss), getattr(loss, "requires_grad", False)


def _losses(loss_of: Callable, ranks: int, samples: int) -> list[float]:
    found = launch(_loss_with, ranks, loss_of, samples).results
    assert None not in found, "nothing was returned. Is a `return` missing?"
    return [loss for loss, _ in found]


def is_the_mean_alone(loss_of: Callable) -> None:
    """be the mean of the losses on one rank"""
    expect(_losses(loss_of, 1, 7)[0], 4.0, "of losses 1 to 7", 1e-5)


def averages_to_the_mean(loss_of: Callable) -> None:
    """average to the mean of all losses where the shares are unequal"""
    for ranks, shares in ((2, "4 and 3"), (3, "3, 2 and 2")):
        what = f"losses 1 to 7 in shares of {shares} samples: the ranks' average"
        expect(sum(_losses(loss_of, ranks, 7)) / ranks, 4.0, what, within=1e-5)


def is_nothing_without_samples(loss_of: Callable) -> None:
    """be 0 on a rank that has no sample of the batch"""
    loss, can_go_back = launch(_loss_with, 2, loss_of, 1).results[1]
    expect(loss, 0.0, "one sample on two ranks: the loss of rank 1")
    assert can_go_back, "rank 1: the 0 isn't computed from `output`, so `backward` fails"


def _epoch_with(rank: int, world_size: int, loss_of: Callable) -> torch.Tensor:
    """An epoch of four steps, whose last batch is one sample."""
    training.shared_loss = loss_of  # in this rank only
    return training.train(rank, world_size, epochs=1, batch=479, lr=0.1)[1]


def trains_like_one(loss_of: Callable) -> None:
    """make an epoch on 2 and 3 ranks end where one process ends"""
    _expect_near(_epoch_with, (2, 3), loss_of, sgd.shared_loss)


build = Builder(
    "distributed_sgd",
    {
        sgd.average_gradients: [
            leaves_the_mean,
            leaves_the_parameters,
            takes_the_steps_of_one,
        ],
        sgd.shared_loss: [
            is_the_mean_alone,
            averages_to_the_mean,
            is_nothing_without_samples,
            trains_like_one,
        ],
    },
)
