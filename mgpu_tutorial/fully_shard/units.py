"""A small transformer, the plan that shards it, and the ways that look like the plan."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.optim import Adam

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


def watch_units(model: SmallTransformer) -> list[int]:
    """A list: the bytes of parameters that are whole on this rank as each block begins."""
    whole = []

    def look(block: nn.Module, inputs: tuple) -> None:
        there = [p for p in model.parameters() if not isinstance(p, DTensor)]
        whole.append(sum(p.nbytes for p in there))

    for block in model.blocks:
        block.register_forward_pre_hook(look)  # runs after fully_shard's own
    return whole


# Mistakes that give wrong numbers and no error


def optimizer_too_early(rank: int, world_size: int) -> list[float]:
    """The optimizer before the plan: the losses of twenty steps on the same batch."""
    model, losses = new_model(), []
    optimizer = Adam(model.parameters(), lr=0.01)
    shard_blocks(model)  # puts other parameters in the place of those
    for _ in range(20):
        optimizer.zero_grad()
        loss = loss_of(model, share_of_batch(rank, world_size))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def forget_the_root(rank: int, world_size: int) -> tuple[int, str]:
    """The blocks alone are sharded: how many parameters are not, and a gradient of one."""
    model = new_model()
    for block in model.blocks:
        fully_shard(block)
    loss_of(model, share_of_batch(rank, world_size)).backward()
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    return len(plain), f"{model.norm.bias.grad.norm():.2f}"
