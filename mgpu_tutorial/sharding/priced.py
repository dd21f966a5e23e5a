"""Two steps of Llama 3 8B, sharded in one of several ways, to be priced."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from mgpu_tutorial.lab import span
from mgpu_tutorial.sharding.blocks import PrefetchingBlock, fully_sharded, linked
from mgpu_tutorial.sharding.stages import Prepared
from mgpu_tutorial.sharding.zero import recompute
from mgpu_tutorial.shared.price import llama_3_8b


def ahead(llama: nn.Sequential, adam: Callable) -> Prepared:
    """Stage 3 whose blocks know their neighbours: they gather and scatter beside compute."""
    fully_sharded(llama, list(llama), kind=PrefetchingBlock)
    model = linked(list(llama))
    optimizer = adam(model.parameters())
    return Prepared(model, optimizer, optimizer.step)


def train_llama(rank: int, world_size: int, way: Callable, tokens: int = 8192) -> None:
    """Embedding, 4 of 32 layers and head, in bfloat16, on so many tokens a rank and step.

    `way(model, adam)` returns what `prepare` returns.
    """
    torch.set_default_dtype(torch.bfloat16)
    llama = llama_3_8b(layers=4)
    model, optimizer, take_step = way(llama, partial(AdamW, foreach=True))
    for layer in llama[1:-2]:  # not the embedding, the last norm and the head
        recompute(layer)
    batch = torch.zeros(1, tokens, dtype=torch.long)
    for step in range(2):
        model.zero_grad()
        optimizer.zero_grad()  # at stage 2 of the shard
        with span(f"step {step}"):
            with span("forward"):
                loss = cross_entropy(model(batch).flatten(0, 1), batch.flatten())
            with span("backward"):
                loss.backward()
            with span("optimizer"):
                take_step()
