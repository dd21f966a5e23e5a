"""A plan: who shares the batch, who shares a product, who has which layers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mgpu_tutorial.language_model.model import BLOCKS, HEADS
from mgpu_tutorial.tensor_parallel.block import Block


class Plan(NamedTuple):
    """How many ranks share the batch (dp), a product (tp) and the layers (pp).

    With `zero` = 1 each rank of a dp group keeps Adam's moments of its own parameters only.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0

    @property
    def ranks(self) -> int:
        """The number of ranks that the plan takes."""
        return self.dp * self.tp * self.pp

    def __str__(self) -> str:
        pairs = zip(self, Plan(), self._fields, strict=True)
        return ",".join(f"{name}={n}" for n, default, name in pairs if n != default) or "dp=1"


def plan_of(words: str) -> Plan:
    """The plan that a text such as "dp=2,tp=2" names; ValueError for any other text."""
    try:
        pairs = [part.split("=") for part in words.replace(" ", "").split(",")]
        return Plan(**{name: int(number) for name, number in pairs})
    except (ValueError, TypeError):
        names = ", ".join(Plan._fields)
        raise ValueError(
            f"plan {words!r}: expected something like dp=2,tp=2 with {names}"
        ) from None


def require_possible(plan: Plan, world_size: int, batch: int, micro_batches: int) -> None:
    """Raise ValueError, the same on every rank, where the plan cannot be."""
    smallest = min(plan.dp, plan.tp, plan.pp)
    wrong = {
        "dp, tp and pp must be at least 1": smallest < 1,
        f"zero={plan.zero} is not 0 or 1": plan.zero not in (0, 1),
        f"it takes {plan.ranks} ranks, and there are {world_size}": plan.ranks != world_size,
        f"{plan.tp} ranks cannot share {HEADS} heads evenly": HEADS % max(1, plan.tp),
        f"{plan.pp} stages cannot share {BLOCKS} blocks evenly": BLOCKS % max(1, plan.pp),
        f"{batch} sequences cannot be cut into {plan.dp} shares of {micro_batches} "
        "equal micro-batches": batch % max(1, plan.dp * micro_batches),
    }
    if found := [problem for problem, is_so in wrong.items() if is_so]:
        raise ValueError(f"plan {plan}: {found[0]}")


def mesh_of(plan: Plan, device: str = "cpu") -> DeviceMesh:
    """The ranks in three dimensions; a tp group has neighbouring numbers."""
    return init_device_mesh(
        device, (plan.pp, plan.dp, plan.tp), mesh_dim_names=("pp", "dp", "tp")
    )


def share_products(block: Block, group: dist.ProcessGroup, parts: Any) -> None:
    """Attention by heads and the MLP by features: columns first, then rows."""
    attention, mlp = block.attention, block.mlp
    attention.qkv = parts.ColumnParallelLinear(attention.qkv, group)
    attention.out = parts.RowParallelLinear(attention.out, group)
    mlp.up = parts.ColumnParallelLinear(mlp.up, group)
    mlp.down = parts.RowParallelLinear(mlp.down, group)


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
    """What this rank holds, and with whom it shares what, in three lines."""
    numbers = sum(parameter.numel() for parameter in model.parameters())
    layers = ", ".join(type(layer).__name__ for layer in model)
    with_whom = {
        n: dist.get_process_group_ranks(mesh[n].get_group()) for n in ("dp", "tp", "pp")
    }
    return (
        f"holds {numbers:,} numbers: {layers}\n"
        f"shares products with ranks {with_whom['tp']}, the batch with {with_whom['dp']}\n"
        f"is stage {mesh['pp'].get_local_rank()} of {plan.pp}, along ranks {with_whom['pp']}"
    )
