"""ZeRO 1: every rank has all parameters and gradients, and steps the parameters that it owns.

The optimizer's state is shared out (https://arxiv.org/abs/1910.02054, section 5.1).
"""

import torch
import torch.distributed as dist
from torch import nn


def owners(parameters: list[nn.Parameter], world_size: int) -> list[int]:
    """The owner of each parameter: the largest first, each to the rank with least so far."""
    owner, owned = [0] * len(parameters), [0] * world_size
    for i in sorted(range(len(parameters)), key=lambda i: -parameters[i].numel()):
        owner[i] = owned.index(min(owned))
        owned[owner[i]] += parameters[i].numel()
    return owner


def sharded_step(
    parameters: list[nn.Parameter], owner: list[int], optimizer: torch.optim.Optimizer
) -> None:
    """Rank owner[i] gets the mean gradient of parameter i, steps it, and sends it to all.

    `optimizer` has the parameters that this rank owns.
    """
    for i, parameter in enumerate(parameters):
        dist.reduce(parameter.grad, owner[i])
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    for i, parameter in enumerate(parameters):
        dist.broadcast(parameter.data, owner[i])
