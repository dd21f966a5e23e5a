"""Experts by the skew of their load: seconds of a layer, forward and backward.

    python benchmarks/experts.py [--ranks 4] [--steps 10] [--repeats 3]

A share of all tokens takes the two experts of rank 0, the others are spread evenly; "busiest"
is what rank 0 then has to do, over the mean. A time ends when the last rank has finished.
"""

from functools import partial

import torch
import torch.distributed as dist
from common import all_turns, median_ms, options, ratio, show

from mgpu_tutorial.experts.layer import run_experts
from mgpu_tutorial.experts.parallel import combine, dispatch
from mgpu_tutorial.lab.measure import in_turns

TOKENS, EXPERTS, K, WIDTH, HIDDEN = 512, 8, 2, 256, 1024
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


def choices(share: float) -> torch.Tensor:
    """Two experts for each of a rank's tokens: 0 and 1 for a share of them, else in turn."""
    tokens = torch.arange(TOKENS)
    first = 2 * (tokens % (EXPERTS // 2))
    first[: int(share * TOKENS)] = 0
    return torch.stack([first, first + 1], dim=1)


def time_shares(rank: int, world_size: int, steps: int) -> dict[float, list[float]]:
    """The seconds of a forward and backward with each share, in turns."""
    torch.manual_seed(rank)
    x, weights = torch.randn(TOKENS, WIDTH), torch.full((TOKENS, K), 0.5)
    own = EXPERTS // world_size
    up = torch.randn(own, WIDTH, HIDDEN).requires_grad_()
    down = torch.randn(own, HIDDEN, WIDTH).requires_grad_()

    def step(chosen: torch.Tensor) -> None:
        rows = x.clone().requires_grad_().repeat_interleave(K, dim=0)
        arrived, which, way = dispatch(rows, chosen.flatten(), EXPERTS)
        combine(run_experts(arrived, which, up, down), way, weights).sum().backward()
        dist.barrier()

    actions = {share: partial(step, choices(share)) for share in SHARES}
    return in_turns(actions, steps, warm_up=2)


if __name__ == "__main__":
    given = options(__doc__, ranks=4, steps=10, repeats=3)
    turns = all_turns(given, time_shares, given.steps)
    rows = []
    for share, seconds in turns.items():
        busiest = f"{1 - share + share * given.ranks:.2f}"
        rows.append([f"{share:.0%}", busiest, median_ms(seconds), ratio(seconds, turns[0.0])])
    show(given, ["to rank 0", "busiest", "ms", "times even"], rows)
