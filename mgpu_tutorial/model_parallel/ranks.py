"""A model in two stages, each on a rank: for a price, which knows ranks and no devices."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab import span


def train_split(
    rank: int,
    world_size: int,
    layers: int,
    model_of: Callable[[], nn.Sequential],
    tokens: Tensor,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
) -> Tensor | None:
    """Two steps: rank 0 has the embedding and so many layers; rank 1 returns the loss.

    `tokens` are (sequences, length).
    """
    if world_size != 2:
        raise ValueError(f"two stages need two ranks, got {world_size}")
    model = model_of()
    shape = *tokens[:, 1:].shape, model[0].embedding_dim
    stage = model[: 1 + layers] if rank == 0 else model[1 + layers :]
    del model  # of the other stage nothing is left here
    buffer = torch.empty(shape, dtype=next(stage.parameters()).dtype)
    stepping = optimizer(stage.parameters(), foreach=True)
    for step in range(2):
        with span(f"step {step}"):
            if rank == 0:
                output = stage(tokens[:, :-1])
                dist.send(output.detach(), 1)
                dist.recv(buffer, 1)
                output.backward(buffer)
            else:
                dist.recv(buffer, 0)
                leaf = buffer.detach().requires_grad_()  # its gradient is what rank 0 needs
                loss = cross_entropy(stage(leaf).mT, tokens[:, 1:])
                loss.backward()
                dist.send(leaf.grad, 0)
            stepping.step()
            stepping.zero_grad()
    return loss.detach() if rank else None
