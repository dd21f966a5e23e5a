"""What to do when many tokens want the same experts."""

import torch


def load(chosen: torch.Tensor, experts: int) -> torch.Tensor:
    """How many choices each expert got."""
    return chosen.flatten().bincount(minlength=experts)


def auxiliary_loss(scores: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """1 for equal loads, more if experts with a high load have high probabilities too."""
    shares = counts / counts.sum()  # without a gradient
    return len(counts) * (shares * scores.softmax(dim=1).mean(dim=0)).sum()


def move_bias(bias: torch.Tensor, counts: torch.Tensor, rate: float) -> torch.Tensor:
    """A step up for each expert below the mean load of all ranks, a step down above it."""
    return bias + rate * (counts.double().mean() - counts).sign()
