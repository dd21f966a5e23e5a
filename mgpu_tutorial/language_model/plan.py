"""A plan: who shares the batch, a product, a sequence, and who has which layers."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import scaled_dot_product_attention

from mgpu_tutorial.language_model.model import SHARED, Embedding
from mgpu_tutorial.tensor_parallel.block import Block


class Plan(NamedTuple):
    """How many ranks share the batch (dp), a product (tp), the layers (pp), a sequence (cp).

    With `zero` = 1 each rank of a dp group keeps Adam's moments of its own parameters only.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0

    @property
    def ranks(self) -> int:
        """The number of ranks that the plan takes."""
        return self.dp * self.tp * self.pp * self.cp

    def __str__(self) -> str:
        pairs = zip(self, Plan(), self._fields, strict=True)
        return ",".join(f"{name}={n}" for n, default, name in pairs if n != default) or "dp=1"


def plan_of(words: str) -> Plan:
    """The plan that a text such as "dp=2,tp=2" names; ValueError for any other text."""
    try:
        pairs = dict(part.split("=") for part in words.replace(" ", "").split(","))
        return Plan(**{name: int(number) for name, number in pairs.items()})
    except (ValueError, TypeError):
        names = ", ".join(Plan._fields)
        raise ValueError(
            f"plan {words!r}: expected something like dp=2,tp=2 with {names}"
        ) from None


def require_possible(plan: Plan, world_size: int) -> None:
    """Raise ValueError, the same on every rank, where the plan cannot be."""
    if plan.ranks != world_size or min(plan[:4]) < 1:
        why = f"it takes {plan.ranks} ranks, and there are {world_size}"
        raise ValueError(f"plan {plan}: {why}")
    if plan.zero > 1:
        raise ValueError(f"plan {plan}: zero is 0 or 1")
    for name, (count, what) in SHARED.items():
        if count % (ranks := getattr(plan, name)):
            raise ValueError(f"plan {plan}: {ranks} ranks cannot share {count} {what} evenly")


def mesh_of(plan: Plan, device: str = "cpu") -> DeviceMesh:
    """The ranks in four dimensions; a tp group has neighbouring numbers."""
    sizes, names = (plan.pp, plan.dp, plan.cp, plan.tp), ("pp", "dp", "cp", "tp")
    return init_device_mesh(device, sizes, mesh_dim_names=names)


def share_products(block: Block, group: dist.ProcessGroup, parts: Any) -> None:
    """Attention by heads and the MLP by features: columns first, then rows."""
    attention, mlp = block.attention, block.mlp
    attention.qkv = parts.ColumnParallelLinear(attention.qkv, group)
    attention.out = parts.RowParallelLinear(attention.out, group)
    mlp.up = parts.ColumnParallelLinear(mlp.up, group)
    mlp.down = parts.RowParallelLinear(mlp.down, group)


def share_sequence(
    model: nn.Sequential, places: Tensor, group: dist.ProcessGroup, f: Callable, g: Callable
) -> None:
    """Each rank of a cp group has some `places` of each sequence, and attends to all.

    g adds up the ranks' keys and values, forward; f adds up their gradients, backward.
    """
    length = len(places) * dist.get_world_size(group)
    earlier = torch.arange(length, device=places.device) <= places[:, None]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, _, size = q.shape
        zeros = q.new_zeros(2, batch, heads, length, size)
        mine = zeros.index_copy(3, places, torch.stack([k, v]))
        k, v = f(g(mine, group), group)
        return scaled_dot_product_attention(q, k, v, attn_mask=earlier)

    for layer in model:
        if isinstance(layer, Block):
            layer.attention.attend = attend
        elif isinstance(layer, Embedding):
            layer.forward = partial(layer.forward, places=places)


def cut_model(
    model: nn.Sequential, mesh: DeviceMesh, share: Callable[[Block, dist.ProcessGroup], None]
) -> nn.Sequential:
    """This rank's part of a model: its stage's layers, each block shared by its tp group.

    The model is an embedding, blocks, and a head; `share(block, group)` cuts a block.
    """
    stage, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
    each = (len(model) - 2) // stages
    blocks = list(model)[1 + stage * each : 1 + (stage + 1) * each]
    for block in blocks:
        share(block, mesh["tp"].get_group())
    first = [model[0]] if stage == 0 else []
    last = [model[-1]] if stage == stages - 1 else []
    return nn.Sequential(*first, *blocks, *last)


def said(plan: Plan, model: nn.Module, mesh: DeviceMesh) -> str:
    """What this rank holds, and what it sends to whom, in three lines."""
    numbers = sum(parameter.numel() for parameter in model.parameters())
    layers = ", ".join(type(layer).__name__ for layer in model)
    ranks = {n: dist.get_process_group_ranks(mesh[n].get_group()) for n in SHARED}
    return (
        f"holds {numbers:,} numbers: {layers}\n"
        f"adds up activations with ranks {ranks['tp']}, gradients with {ranks['dp']}, "
        f"keys and values with {ranks['cp']}\n"
        f"is stage {mesh['pp'].get_local_rank()} of {plan.pp}: "
        f"activations go along ranks {ranks['pp']}"
    )
