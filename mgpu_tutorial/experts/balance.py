"""Experts that learn in one process: what an even load costs."""

import torch
from torch import Tensor, nn

from mgpu_tutorial.experts.layer import Experts, choose, tokens_per_expert


def auxiliary_loss(scores: Tensor, counts: Tensor) -> Tensor:
    """1 for equal `counts` of all ranks together, more where busy experts are likely too."""
    shares = counts / counts.sum()  # without a gradient
    return len(counts) * (shares * scores.softmax(dim=1).mean(dim=0)).sum()


def move_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """A step up for each expert below the mean load of all ranks, a step down above it."""
    return bias + rate * (counts.double().mean() - counts).sign()


def normal(seed: int, *shape: int) -> Tensor:
    """Normal random numbers that depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def lesson(step: int, common: float, draw: int) -> tuple[Tensor, Tensor]:
    """256 tokens, each on one of 32 topics, and the right answers to them.

    The first topic is the most frequent. An answer is a product with the topic's own matrix
    and, `common` times, with one matrix for all topics.
    """
    generator = torch.Generator().manual_seed(step)
    topic = torch.multinomial(1 / torch.arange(1, 33), 256, True, generator=generator)
    x = normal(draw, 32, 16)[topic] + normal(1000 + step, 256, 16)
    matrices = normal(draw + 1, 32, 16, 16) + common * normal(draw + 2, 16, 16)
    return x, torch.einsum("td,tde->te", x, matrices[topic] / 4)


def learn(
    model: Experts, factor: float = 0, rate: float = 0, common: float = 0, draw: int = 1
) -> tuple[list[float], list[float]]:
    """Train with an auxiliary loss or a bias: the busiest expert's excess, and the error."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    bias, excesses, errors = torch.zeros(model.experts).double(), [], []
    for step in range(300):
        x, right = lesson(step, common, draw)
        scores = x @ model.router
        chosen = choose(scores + bias, model.k)  # the only use of the bias
        weights = scores.softmax(dim=1).gather(1, chosen)
        counts = tokens_per_expert(chosen, model.experts)
        error = (model.answer(x, chosen, weights) - right).square().mean()
        (error + factor * auxiliary_loss(scores, counts)).backward()
        adam.step()
        adam.zero_grad()
        bias = move_bias(bias, counts, rate)
        excesses.append(counts.max().item() / counts.double().mean().item() - 1)
        errors.append(error.item())
    return excesses, errors
