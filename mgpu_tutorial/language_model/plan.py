"""A plan: who shares the batch, a product, a sequence, who has which layers; and a step."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from mgpu_tutorial.language_model.model import Embedding
from mgpu_tutorial.tensor_parallel.block import Block
from mgpu_tutorial.tensor_parallel.layers import Shard


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


SHARED = {  # by the dimension of a plan: what its ranks share, and how many there are
    "dp": (8, "sequences of a micro-batch"),
    "tp": (8, "heads"),
    "pp": (4, "blocks"),
    "cp": (32, "pairs of characters"),
}


def plan_of(words: str, world_size: int | None = None) -> Plan:
    """The plan that a text such as "dp=2,tp=2" names; ValueError where it cannot be."""
    try:
        parts = [part.split("=") for part in words.replace(" ", "").split(",")]
        pairs = dict(parts)
        plan = Plan(**{name: int(number) for name, number in pairs.items()})
    except (ValueError, TypeError, AttributeError):
        wanted = f"something like dp=2,tp=2 with {', '.join(Plan._fields)}"
        raise ValueError(f"plan {words!r}: expected {wanted}") from None
    if len(pairs) < len(parts):
        raise ValueError(f"plan {words}: a name stands there twice; give each one number")
    if world_size and plan.ranks != world_size:
        why = f"it takes {plan.ranks} ranks, and there are {world_size}"
        raise ValueError(f"plan {words}: {why}")
    if plan.zero not in (0, 1):
        raise ValueError(f"plan {words}: zero is 0 or 1")
    for name, (count, what) in SHARED.items():
        if (ranks := getattr(plan, name)) < 1 or count % ranks:
            raise ValueError(
                f"plan {words}: {ranks} ranks cannot share {count} {what} evenly"
            )
    return plan


def mesh_of(plan: Plan) -> DeviceMesh:
    """The ranks in four dimensions; a tp group has neighbouring numbers."""
    sizes, names = (plan.pp, plan.dp, plan.cp, plan.tp), ("pp", "dp", "cp", "tp")
    return init_device_mesh(torch.get_default_device().type, sizes, mesh_dim_names=names)


def share_products(block: Block, group: dist.ProcessGroup, parts: Any) -> None:
    """Attention by heads and the MLP by features: columns first, then rows."""
    attention, mlp = block.attention, block.mlp
    attention.qkv = parts.ColumnParallelLinear(attention.qkv, group)
    attention.out = parts.RowParallelLinear(attention.out, group)
    mlp.up = parts.ColumnParallelLinear(mlp.up, group)
    mlp.down = parts.RowParallelLinear(mlp.down, group)


def share_sequence(
    model: nn.Sequential, places: Tensor, group: dist.ProcessGroup, parts: Any
) -> None:
    """Each rank of a cp group has some `places` of each sequence, and attends to all.

    g adds up the ranks' keys and values, forward; f adds up their gradients, backward.
    """
    f, g = parts.CopyToRanks.apply, parts.SumOverRanks.apply
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
    """This rank's stage of embedding, blocks and head; `share` cuts a block for its group."""
    stage, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
    each, rest = divmod(len(model) - 2, stages)
    if rest or not each:
        raise ValueError(f"{len(model) - 2} blocks do not divide into {stages} equal stages")
    blocks = list(model)[1 + stage * each : 1 + (stage + 1) * each]
    for block in blocks:
        share(block, mesh["tp"].get_group())
    first = [model[0]] if stage == 0 else []
    last = [model[-1]] if stage == stages - 1 else []
    return nn.Sequential(*first, *blocks, *last)


def require_equal_parts(inputs: Tensor, targets: Tensor) -> None:
    """ValueError where the mean of two micro-batches' means isn't the mean of the batch."""
    if len(inputs) % 2:
        raise ValueError(f"{len(inputs)} sequences do not divide into two micro-batches")
    if bool((targets == -100).any()):
        raise ValueError(
            "a target of -100 does not count in the mean of cross_entropy, so equal "
            "micro-batches would have unequal counts: leave those sequences out of the batch"
        )


def forward_backward(
    model: nn.Module,
    mesh: DeviceMesh,
    inputs: Tensor,
    targets: Tensor,
    order_of: Callable,
    loss_of: Callable = cross_entropy,
) -> Tensor:
    """Forward and backward of all micro-batches, in the order of this rank's stage; the loss.

    Activations go to the next stage, gradients come back. Only the last stage knows the
    loss, the mean of `loss_of` scores (rows, 96) and targets (rows); the others return 0.
    """
    ranks = dist.get_process_group_ranks(mesh["pp"].get_group())
    stage, last = mesh["pp"].get_local_rank(), len(ranks) - 1
    norm = next(model.parameters())  # of a later stage: as long as an activation is wide
    require_equal_parts(inputs, targets)
    micro, xs, ys = 2, inputs.chunk(2), targets.chunk(2)
    kept, sending, loss = {}, [], norm.new_zeros(())
    for task in order_of(stage, len(ranks), micro):
        i = int(task[1:])
        if task[0] == "F":
            x = xs[i]
            if stage > 0:
                x = norm.new_empty(*x.shape, len(norm))
                dist.recv(x, ranks[stage - 1])
                x.requires_grad_()
            y = model(x)
            if stage < last:
                sending.append(dist.isend(y.detach(), ranks[stage + 1]))
            else:
                y = loss_of(y.flatten(0, 1), ys[i].flatten()) / micro
                loss += y.detach()
            kept[i] = x, y
        else:
            x, y = kept.pop(i)
            gradient = torch.ones_like(y)  # of the loss
            if stage < last:
                dist.recv(gradient, ranks[stage + 1])
            y.backward(gradient)
            if stage > 0:
                sending.append(dist.isend(x.grad, ranks[stage - 1]))
    for work in sending:
        work.wait()
    return loss


def average_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Average all gradients at once, over the ranks with the same part of the model."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = parameters_to_vector(gradients)
    for name in ("dp", "cp"):
        dist.all_reduce(flat, group=mesh[name].get_group())
    copies = mesh["dp"].size() * mesh["cp"].size()
    vector_to_parameters(flat / copies, gradients)


def clip_gradients(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shorten all gradients to the norm 1; a copy counts on its tp group's first rank."""
    first = mesh["tp"].get_local_rank() == 0
    counted = [p for p in model.parameters() if first or isinstance(p, Shard)]
    total = sum(parameter.grad.square().sum() for parameter in counted)
    for name in ("tp", "pp"):
        dist.all_reduce(total, group=mesh[name].get_group())
    factor = 1.0 / total.sqrt().clamp(min=1.0).item()  # a NaN stays one, in all gradients
    for parameter in model.parameters():
        parameter.grad *= factor


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
