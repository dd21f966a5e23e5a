"""What `average_gradients` and the weight of unequal shares must do, on real ranks."""

from collections.abc import Callable

import torch
from torch import nn

from mgpu_tutorial.distributed_sgd import sgd, training
from mgpu_tutorial.lab.teach.build import Builder, expect, launch

# average_gradients


def _averaged(
    rank: int, world_size: int, average: Callable, drawn: bool = False
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The gradients and the parameters of a linear layer after `average`.

    Before it, the gradients of rank r are 2r + 1 times 1, 10 and 100, or `drawn` by chance.
    """
    model = nn.Linear(2, 1)
    first = {"weight": [[1.0, 10.0]], "bias": [100.0]}
    for name, parameter in model.named_parameters():
        nn.init.constant_(parameter, 7.0)
        parameter.grad = (2 * rank + 1) * torch.tensor(first[name])
        if drawn:
            generator = torch.Generator().manual_seed(rank)
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    average(model)
    parameters = list(model.parameters())
    return [p.grad for p in parameters], [p.detach() for p in parameters]


def leaves_the_mean(average: Callable) -> None:
    """leave the mean of all ranks' gradients in .grad, for weight and bias"""
    for world_size in (1, 2, 3):
        results = launch(_averaged, world_size, average).results
        wanted = [
            torch.tensor([[1.0, 10.0]]) * world_size,
            torch.tensor([100.0 * world_size]),
        ]
        own = torch.tensor([[1.0, 10.0]])  # rank 0's, which is the mean on one rank only
        assert world_size == 1 or not torch.equal(results[0][0][0], own), (
            f"on {world_size} ranks .grad is still each rank's own: change it in place"
        )
        for rank, (gradients, _) in enumerate(results):
            who = f"rank {rank} of {world_size}: the gradient of the"
            expect(gradients[0], wanted[0], f"{who} weight", within=1e-3)
            expect(gradients[1], wanted[1], f"{who} bias", within=1e-3)


def leaves_the_parameters(average: Callable) -> None:
    """leave the parameters as they are"""
    for _, parameters in launch(_averaged, 2, average).results:
        expect(parameters, [torch.full((1, 2), 7.0), torch.tensor([7.0])], "the parameters")


def leaves_the_same_bits(average: Callable) -> None:
    """leave the same bits on every rank"""
    results = launch(_averaged, 3, average, drawn=True).results
    for rank, (gradients, _) in enumerate(results):
        expect(gradients, results[0][0], f"the gradients of rank {rank}, beside rank 0's")


def _steps_with(rank: int, world_size: int, average: Callable) -> torch.Tensor:
    """Three steps of the lesson's loop with another way to average."""
    sgd.average_gradients = average  # in this rank only
    return sgd.take_steps(rank, world_size, steps=3)


def takes_the_steps_of_one(average: Callable) -> None:
    """make 2 and 4 ranks take the steps of one process"""
    (one,) = launch(sgd.take_steps, 1, steps=3).results
    for world_size in (2, 4):
        results = launch(_steps_with, world_size, average).results
        _expect_near(results, one, f"{world_size} ranks")


# shared_loss


def _losses_with(rank: int, world_size: int, loss_of: Callable, samples: int) -> float | None:
    """This rank's loss where the sample number i of the batch has a loss of i + 1."""
    loss = _loss_with(rank, world_size, loss_of, samples)
    return None if loss is None else float(loss)


def _can_go_back(rank: int, world_size: int, loss_of: Callable, samples: int) -> bool:
    return getattr(_loss_with(rank, world_size, loss_of, samples), "requires_grad", False)


def _loss_with(
    rank: int, world_size: int, loss_of: Callable, samples: int
) -> torch.Tensor | None:
    losses = torch.arange(1.0, samples + 1).tensor_split(world_size)[rank]
    output = -losses[:, None].repeat(1, 10).requires_grad_()
    return loss_of(output, torch.zeros(len(losses), dtype=torch.int64), samples)


def is_the_mean_alone(loss_of: Callable) -> None:
    """be the mean of the losses on one rank"""
    expect(launch(_losses_with, 1, loss_of, 7).results[0], 4.0, "of losses 1 to 7", 1e-5)


def averages_to_the_mean(loss_of: Callable) -> None:
    """average to the mean of all losses where the shares are unequal"""
    for world_size, shares in ((2, "4 and 3"), (3, "3, 2 and 2")):
        found = launch(_losses_with, world_size, loss_of, 7).results
        what = f"losses 1 to 7 in shares of {shares} samples: the ranks' average"
        expect(sum(found) / world_size, 4.0, what, within=1e-5)


def is_nothing_without_samples(loss_of: Callable) -> None:
    """be 0 on a rank that has no sample of the batch"""
    found = launch(_losses_with, 2, loss_of, 1).results
    expect(found[1], 0.0, "one sample on two ranks: the loss of rank 1")
    can_go_back = launch(_can_go_back, 2, loss_of, 1).results[1]
    assert can_go_back, "rank 1: the 0 isn't computed from `output`, so `backward` fails"


def _epoch_with(rank: int, world_size: int, loss_of: Callable) -> torch.Tensor:
    """An epoch of four steps, whose last batch is one sample."""
    training.shared_loss = loss_of  # in this rank only
    return training.train(rank, world_size, epochs=1, batch=479, lr=0.1)[1]


def trains_like_one(loss_of: Callable) -> None:
    """make an epoch on 2 and 3 ranks end where one process ends"""
    (one,) = launch(_epoch_with, 1, sgd.shared_loss).results
    for world_size in (2, 3):
        results = launch(_epoch_with, world_size, loss_of).results
        _expect_near(results, one, f"{world_size} ranks")


def _expect_near(results: list[torch.Tensor], one: torch.Tensor, who: str) -> None:
    far = max((result - one).abs().max().item() for result in results)
    assert far < 1e-6, f"{who} end {far:.0e} away from one process"


build = Builder(
    "distributed_sgd",
    {
        sgd.average_gradients: [
            leaves_the_mean,
            leaves_the_parameters,
            leaves_the_same_bits,
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
