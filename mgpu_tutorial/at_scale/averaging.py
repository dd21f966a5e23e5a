"""Models that are averaged seldom, for links that carry little."""

import torch
import torch.distributed as dist
from torch import nn


def local_sgd(rank: int, world_size: int, every: int, data: torch.Tensor) -> torch.Tensor:
    """SGD on this rank's `data`; every so many steps all ranks average their parameters.

    `data` has a row for each rank: (ranks, steps, batch, 16).
    """
    if data.shape[1] % every:
        raise ValueError(f"{data.shape[1]} steps do not end with an average, every {every}")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x in enumerate(data[rank], 1):
        sgd.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        sgd.step()
        if step % every == 0:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= world_size
    return nn.utils.parameters_to_vector(model.parameters()).detach()
