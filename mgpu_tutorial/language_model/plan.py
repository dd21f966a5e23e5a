"""A plan: who shares the batch, a product, a sequence, who has which layers; and a step."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy, pad

from mgpu_tutorial.experts.layer import Experts
from mgpu_tutorial.language_model import model as models
from mgpu_tutorial.shared.guards import whole
from mgpu_tutorial.tensor_parallel.block import Block
from mgpu_tutorial.tensor_parallel.layers import Shard, SumOverRanks


class Plan(NamedTuple):
    """How many ranks share the batch (dp), a product (tp), the layers (pp), a sequence (cp).

    Ranks along dp and cp have the same part. With `zero` = 1 each of them keeps Adam's
    moments of its own parameters only, and with 3 a shard of each layer. In a model with
    experts `ep` neighbours along dp share them.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    zero: int = 0
    ep: int = 1

    @property
    def ranks(self) -> int:
        """The number of ranks that the plan takes."""
        return self.dp * self.tp * self.pp * self.cp


SHARED = {  # by the dimension of a plan: what its ranks share, and how many there are
    "dp": (models.BATCH // models.MICRO_BATCHES, "sequences of a micro-batch"),
    "tp": (models.HEADS, "heads"),  # who can share them can share the characters
    "pp": (models.BLOCKS, "blocks"),
    "cp": (models.CONTEXT // 2, "pairs of characters"),
}
OWNED = 12  # parameters of a block, which ZeRO 1 gives to owners


def plan_of(words: str, world_size: int | None = None, experts: int | None = None) -> Plan:
    """The plan that a text such as "dp=2,tp=2" names; ValueError where it cannot be.

    With `world_size` and `experts` also for so many ranks, and so many experts in a block.
    """
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
    if plan.zero not in (0, 1, 3):
        raise ValueError(f"plan {words}: zero is 0, 1 or 3")
    for name, (count, what) in SHARED.items():
        if (ranks := getattr(plan, name)) < 1 or count % ranks:
            raise ValueError(
                f"plan {words}: {ranks} ranks cannot share {count} {what} evenly"
            )
    if plan.zero == 1 and plan.dp * plan.cp > (most := OWNED * models.BLOCKS // plan.pp):
        why = f"{plan.dp * plan.cp} ranks own the {most} parameters of a stage's blocks"
        raise ValueError(
            f"plan {words}: {why}, so some would own none: use more blocks a stage"
        )
    if plan.zero == 3 and plan.tp > 1:
        raise ValueError(
            f"plan {words}: zero=3 puts copies and shards of a tp group into one tensor, and "
            "the norm would count copies twice: take zero=1, or tp=1"
        )
    if plan.ep < 1 or plan.dp % plan.ep:
        why = f"{plan.ep} ranks cannot share experts where {plan.dp} share the batch"
        raise ValueError(f"plan {words}: {why}: ep must divide dp")
    if plan.ep > 1 and plan.zero:
        raise ValueError(
            f"plan {words}: ZeRO shares out what the dp ranks have alike, and with ep their "
            "experts differ: take zero=0, or ep=1"
        )
    if experts is not None:
        whole("experts", experts, least=0)
        if experts == 1 or experts % plan.ep or (plan.ep > 1 and not experts):
            why = f"experts={experts}, and {plan.ep} ranks share them"
            raise ValueError(f"{why}: give a multiple, 2 or more")
    return plan


def mesh_of(plan: Plan) -> DeviceMesh:
    """The ranks in four dimensions; a tp group has neighbouring numbers."""
    sizes, names = (plan.pp, plan.dp, plan.cp, plan.tp), ("pp", "dp", "cp", "tp")
    return init_device_mesh(torch.get_default_device().type, sizes, mesh_dim_names=names)


def data_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks with the same part of the model as this one: along dp and cp together."""
    every = mesh.mesh.permute(0, 3, 1, 2).reshape(-1, mesh["dp"].size() * mesh["cp"].size())
    group, _ = dist.new_subgroups_by_enumeration(every.tolist())
    return group


def share_products(block: Block, group: dist.ProcessGroup, parts: Any) -> None:
    """Attention by heads and the MLP by features: columns first, then rows."""
    attention, mlp = block.attention, block.mlp
    attention.qkv = parts.ColumnParallelLinear(attention.qkv, group)
    attention.out = parts.RowParallelLinear(attention.out, group)
    if isinstance(mlp, Experts):  # they stay whole
        return
    mlp.up = parts.ColumnParallelLinear(mlp.up, group)
    mlp.down = parts.RowParallelLinear(mlp.down, group)


def share_head(stage: nn.Sequential, group: dist.ProcessGroup, parts: Any) -> None:
    """The scores by characters, where this stage has the head: a rank gets some of them."""
    if dist.get_world_size(group) > 1 and isinstance(stage[-1], models.Head):
        stage[-1].scores = parts.ColumnParallelLinear(stage[-1].scores, group)


def loss_over(group: dist.ProcessGroup, loss_of: Callable, parts: Any) -> Callable:
    """The same loss where each rank of a tp group has the scores of some characters.

    Cross-entropy needs three numbers a row of them; another loss gets all scores.
    """
    if dist.get_world_size(group) == 1:
        return loss_of
    if loss_of is cross_entropy:
        return partial(parts.parallel_cross_entropy, group=group)
    return partial(of_whole_scores, loss_of=loss_of, group=group)


def of_whole_scores(
    scores: Tensor, targets: Tensor, loss_of: Callable, group: dist.ProcessGroup
) -> Tensor:
    """A loss of all scores, which every rank puts together: zeros beside its own, then g."""
    ranks, rank, mine = dist.get_world_size(group), dist.get_rank(group), scores.shape[-1]
    beside = pad(scores, (rank * mine, (ranks - rank - 1) * mine))
    return loss_of(SumOverRanks.apply(beside, group), targets)


def share_sequence(stage: nn.Sequential, group: dist.ProcessGroup, parts: Any) -> Tensor:
    """The positions of this rank of a cp group, in each sequence; keys and values travel."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    places = parts.zigzag(models.CONTEXT, rank, ranks).to(next(stage.parameters()).device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, _ = parts.ring_attention(q, k, v, parts.zigzag, group)
        return out.to(q.dtype)

    for layer in stage if ranks > 1 else ():
        if isinstance(layer, Block):
            layer.attention.attend = attend
        elif isinstance(layer, models.Embedding):
            layer.forward = partial(layer.forward, places=places)
    return places


def cut_model(
    model: nn.Sequential, mesh: DeviceMesh, share: Callable[[Block, dist.ProcessGroup], None]
) -> nn.Sequential:
    """This rank's stage of embedding, blocks and head; `share` cuts a block for its group."""
    stage, stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
    each = (len(model) - 2) // stages
    blocks = list(model)[1:-1][stage * each : (stage + 1) * each]
    for block in blocks:
        share(block, mesh["tp"].get_group())
    first = [model[0]] if stage == 0 else []
    last = [model[-1]] if stage == stages - 1 else []
    return nn.Sequential(*first, *blocks, *last)


def require_untied(model: nn.Module, plan: Plan) -> None:
    """ValueError for a tied weight of which pp or tp would make two, as of GPT-2's head."""
    first: dict[nn.Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied = first.setdefault(parameter, name)
        if tied != name and plan.pp * plan.tp > 1:
            raise ValueError(f"`{tied}` and `{name}` are one weight: use neither pp nor tp")


def forward_backward(
    model: nn.Module,
    mesh: DeviceMesh,
    inputs: Tensor,
    targets: Tensor,
    order_of: Callable,
    loss_of: Callable,
) -> Tensor:
    """Forward and backward of all micro-batches, in the order of this rank's stage; the loss.

    Activations go to the next stage, gradients come back. Only the last stage knows the
    loss, the mean of `loss_of` scores (rows, 96 / tp) and targets (rows); the others return
    0. A model that has `no_sync` waits in it for its last backward.
    """
    ranks = dist.get_process_group_ranks(mesh["pp"].get_group())
    stage, last = mesh["pp"].get_local_rank(), len(ranks) - 1
    like = next(model.parameters())  # for the dtype and the device of activations
    micro, no_sync = models.MICRO_BATCHES, getattr(model, "no_sync", nullcontext)
    if len(inputs) % micro:
        raise ValueError(f"{len(inputs)} sequences have no {micro} equal parts")
    xs, ys = inputs.chunk(micro), targets.chunk(micro)
    kept, sending, loss = {}, [], like.new_zeros(())
    for task in order_of(stage, len(ranks), micro):
        i = int(task[1:])
        if task[0] == "F":
            x = xs[i]
            if stage > 0:
                x = like.new_empty(*x.shape, models.WIDTH)
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
            with no_sync() if i < micro - 1 else nullcontext():
                y.backward(gradient)
            if stage > 0:
                sending.append(dist.isend(x.grad, ranks[stage - 1]))
    for work in sending:
        work.wait()
    return loss


def clip_gradients(
    model: nn.Module, mesh: DeviceMesh, own: list[nn.Parameter] | None = None
) -> None:
    """Shorten all gradients to the norm 1, in which each parameter counts once.

    With ZeRO `own` are the parameters that only this rank steps: the others along dp and cp
    add up the squares of theirs.
    """
    parameters = list(model.parameters()) if own is None else own
    squares = {None: parameters[0].grad.new_zeros(())}  # of copies; of shards by their group
    for p in parameters:
        group = p.group if isinstance(p, Shard) else None
        squares[group] = squares.get(group, 0) + p.grad.square().sum()
    for group, part in squares.items():
        if group:
            dist.all_reduce(part, group=group)
    total = sum(squares.values())
    for name in ("pp",) if own is None else ("pp", "dp", "cp"):
        dist.all_reduce(total, group=mesh[name].get_group())
    factor = 1.0 / total.sqrt().clamp(min=1.0).item()  # a NaN stays one, in all gradients
    for parameter in parameters:
        parameter.grad *= factor
