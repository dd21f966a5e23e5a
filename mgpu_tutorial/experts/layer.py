"""Experts in one process: a router chooses k of them for each token."""

import torch
from torch import Tensor, nn


def drawn(seed: int, *shape: int) -> Tensor:
    """Random eighths from -1 to 1: sums of their products have no rounding."""
    generator = torch.Generator("cpu").manual_seed(seed)
    whole = torch.randint(-8, 9, shape, generator=generator, device="cpu")
    return whole.to(torch.get_default_device(), torch.float64) / 8


def choose(scores: Tensor, k: int) -> Tensor:
    """The k best experts of each token, best first; of equal scores the lower number."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :k]


def run_experts(rows: Tensor, which: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Send row i through the expert `which[i]`: (rows, width)."""
    results = torch.zeros_like(rows)
    for expert, (first, second) in enumerate(zip(up, down, strict=True)):
        mine = which == expert
        results[mine] = (rows[mine] @ first).relu() @ second
    return results


class Experts(nn.Module):
    """A router and some experts, of which `k` answer each token: x is (tokens, width)."""

    def __init__(self, experts: int, k: int, width: int = 16, hidden: int = 32) -> None:
        super().__init__()
        self.experts, self.k = experts, k
        self.router = nn.Parameter(drawn(1, width, experts))
        self.up = nn.Parameter(drawn(2, experts, width, hidden))
        self.down = nn.Parameter(drawn(3, experts, hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        scores = x @ self.router  # (tokens, experts)
        chosen = choose(scores, self.k)  # (tokens, k)
        weights = scores.softmax(dim=1).gather(1, chosen)
        return self.answer(x, chosen, weights)

    def answer(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The weighted sum of what each token's experts answer: (tokens, width)."""
        rows = x.repeat_interleave(self.k, dim=0)  # one row for each choice
        results = run_experts(rows, chosen.flatten(), self.up, self.down)
        return (weights[..., None] * results.unflatten(0, chosen.shape)).sum(dim=1)


def tokens_per_expert(chosen: Tensor, experts: int) -> Tensor:
    """How many choices each expert got: its load."""
    return chosen.flatten().bincount(minlength=experts)
