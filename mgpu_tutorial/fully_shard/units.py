"""A small transformer, the plans that shard it, and adapters."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from mgpu_tutorial.shared.guards import divides
from mgpu_tutorial.shared.models import SmallTransformer


def new_model(dtype: torch.dtype = torch.float32) -> SmallTransformer:
    """Three blocks and a tied head, 41,888 parameters, always the same."""
    torch.manual_seed(0)
    return SmallTransformer(vocabulary=64, width=32, heads=4, depth=3).to(dtype)


def share_of_batch(rank: int, world_size: int, step: int = 0) -> torch.Tensor:
    """This rank's share of the step's 24 sequences of eight tokens."""
    divides("samples", 24, world_size)
    generator = torch.Generator("cpu").manual_seed(step)
    tokens = torch.randint(64, (24, 8), generator=generator, device="cpu")
    return tokens.chunk(world_size)[rank].to(torch.get_default_device())


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The mean loss of predicting each token from those before it."""
    logits = model(tokens)[:, :-1]
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def shard_blocks(model: SmallTransformer, **settings: object) -> None:
    """Each block is a unit, and the model is one for what is left; the last block stays."""
    *others, last = model.blocks
    for block in others:
        fully_shard(block, **settings)
    fully_shard(last, reshard_after_forward=False, **settings)
    fully_shard(model, **settings)


def shard_on_a_mesh(model: SmallTransformer, copies: int, shards: int) -> None:
    """Cut the model over each row of `shards` ranks, average over each shard's `copies`."""
    device, names = torch.get_default_device().type, ("copies", "shards")
    mesh = init_device_mesh(device, (copies, shards), mesh_dim_names=names)
    shard_blocks(model, mesh=mesh)


def watch_units(model: SmallTransformer) -> list[int]:
    """A list: the bytes of parameters that are whole on this rank as each block begins."""
    whole = []

    def look(block: nn.Module, inputs: tuple) -> None:
        there = [p for p in model.parameters() if not isinstance(p, DTensor)]
        whole.append(sum(p.nbytes for p in there))

    for block in model.blocks:
        block.register_forward_pre_hook(look)  # runs after fully_shard's own
    return whole


class Adapted(nn.Module):
    """A frozen linear layer, and beside it a path through `rank` numbers that is trained."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        like = {"dtype": layer.weight.dtype, "device": layer.weight.device}
        self.down = nn.Linear(layer.in_features, rank, bias=False, **like)
        self.up = nn.Linear(rank, layer.out_features, bias=False, **like)
        nn.init.zeros_(self.up.weight)  # so that at first nothing changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def adapt(model: SmallTransformer, rank: int = 4) -> None:
    """Freeze everything, and give the queries and values of each block an adapter."""
    model.requires_grad_(False)
    for block in model.blocks:
        block.attention.query = Adapted(block.attention.query, rank)
        block.attention.value = Adapted(block.attention.value, rank)
