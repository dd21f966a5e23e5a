"""The model that the tests of this chapter train, and one process by hand."""

import torch
from torch import nn

from mgpu_tutorial.sharding.training import loss_of
from mgpu_tutorial.shared.models import SmallTransformer


def new_model(dtype=torch.float64, tied=True, frozen=False, unused=False):
    """Sizes that no number of ranks divides: a norm has 5 numbers, the embedding 335."""
    torch.manual_seed(0)
    model = SmallTransformer(67, width=5, heads=1, depth=2, tied=tied)
    if unused:
        model.unused = nn.ModuleList([nn.Linear(3, 1)])  # a unit of its own
    model.register_buffer("mark", torch.zeros(1))
    model.to(dtype)
    if frozen:
        model.position.weight.requires_grad_(False)
        model.blocks[0].mlp.up.weight.requires_grad_(False)
    return model


def values(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def train_alone(model, optimizer, steps, parts=1):
    """One process adds up the gradients of each batch's parts, in their order."""
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(parts):
            (loss_of(model, step, part, parts) / parts).backward()
        optimizer.step()
    return values(model)
