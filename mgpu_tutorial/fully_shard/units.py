"""A small transformer, the plan that shards it, and the ways that look like the plan."""

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.optim import Adam, Optimizer

from mgpu_tutorial.shared.models import SmallTransformer


def new_model(dtype: torch.dtype = torch.float32) -> SmallTransformer:
    """Three blocks and a tied head, 41,888 parameters, always the same."""
    torch.manual_seed(0)
    return SmallTransformer(vocabulary=64, width=32, heads=4, depth=3).to(dtype)


def share_of_batch(rank: int, world_size: int, step: int = 0) -> torch.Tensor:
    """This rank's share of the step's 24 sequences of eight tokens."""
    generator = torch.Generator("cpu").manual_seed(step)
    tokens = torch.randint(64, (24, 8), generator=generator, device="cpu")
    return tokens.chunk(world_size)[rank].to(torch.get_default_device())


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The mean loss of predicting each token from those before it."""
    logits = model(tokens)[:, :-1]
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# The plan


def shard_blocks(model: SmallTransformer, **settings: object) -> None:
    """Each block is a unit, and the model is one for what is left; the last block stays."""
    *others, last = model.blocks
    for block in others:
        fully_shard(block, **settings)
    fully_shard(last, reshard_after_forward=False, **settings)
    fully_shard(model, **settings)


# Mistakes that give wrong numbers and no error


def train(
    model: nn.Module, optimizer: Optimizer, rank: int, world_size: int, steps: Iterable[int]
) -> list[float]:
    """Ordinary steps on this rank's shares of these batches; their losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, share_of_batch(rank, world_size, step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def optimizer_too_early(rank: int, world_size: int) -> list[str]:
    """The optimizer before the plan: the losses of steps 1 and 20 on the same batch."""
    model = new_model()
    optimizer = Adam(model.parameters(), lr=0.01)
    shard_blocks(model)  # puts other parameters in the place of those
    losses = train(model, optimizer, rank, world_size, [0] * 20)
    return [f"{losses[i]:.1f}" for i in (0, -1)]


def forget_the_root(rank: int, world_size: int) -> tuple[int, str]:
    """The blocks alone are sharded: how many parameters are not, and a gradient of one."""
    model = new_model()
    for block in model.blocks:
        fully_shard(block)
    loss_of(model, share_of_batch(rank, world_size)).backward()
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    return len(plain), f"{model.norm.bias.grad.norm():.2f}"


def whole_values(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters by name, gathered on every rank."""
    return {name: p.full_tensor().detach() for name, p in model.named_parameters()}
