"""What one rank trains, what its optimizer steps, and a step."""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from mgpu_tutorial.language_model.mixture import ExpertsDDP, share_experts
from mgpu_tutorial.language_model.plan import (
    Plan,
    clip_gradients,
    data_group,
    forward_backward,
    require_untied,
    share_head,
    share_products,
    share_sequence,
)
from mgpu_tutorial.tensor_parallel.block import Block

BUCKET_MB = 0.25  # the gradients of a block, about


class Job(NamedTuple):
    """What one rank trains: its layers, its positions, and with whom."""

    plan: Plan
    mesh: DeviceMesh
    data: dist.ProcessGroup  # the ranks with the same part
    stage: nn.Sequential  # this rank's layers
    model: nn.Module  # they, in a DDP unless ZeRO averages
    places: Tensor  # this rank's positions in each sequence


def averaging(
    stage: nn.Sequential,
    plan: Plan,
    data: dist.ProcessGroup,
    copies: dist.ProcessGroup | None,
    parts: SimpleNamespace,
) -> nn.Module:
    """The stage in what averages its gradients over `data`, the ranks with the same part."""
    wrap = partial(parts.AccumulatingDDP, bucket_cap_mb=BUCKET_MB)
    if plan.zero == 1:  # `sharded_step` does that, after backward
        return stage
    if plan.zero == 3:
        return parts.fully_sharded(stage, list(stage), data)
    if plan.ep > 1:
        return ExpertsDDP(stage, plan.ep, wrap, data, copies)
    return wrap(stage, group=data)


def build_rank(
    whole: nn.Sequential, plan: Plan, mesh: DeviceMesh, parts: SimpleNamespace
) -> Job:
    """This rank's part of a whole model, which is the same on every rank."""
    require_untied(whole, plan)
    # pp: its stage; tp: its shards of the products in it
    stage = parts.cut_model(whole, mesh, partial(share_products, parts=parts))
    share_head(stage, mesh["tp"].get_group(), parts)
    # cp: its positions in each sequence
    places = share_sequence(stage, mesh["cp"].get_group(), parts)
    # ep: its experts in each block, which some other ranks have too
    copies = share_experts(stage, mesh, plan.ep, parts)
    # dp and cp: the ranks with the same part average its gradients
    data = data_group(mesh)
    model = averaging(stage, plan, data, copies, parts)
    return Job(plan, mesh, data, stage, model, places)


def new_adam(
    job: Job, parts: SimpleNamespace, lr: float
) -> tuple[torch.optim.Optimizer, list[int]]:
    """AdamW of the parameters that this rank steps, and the owner of each in `job.data`.

    Before it steps it clips the gradients, which are means by then.
    """
    parameters = list(job.stage.parameters())
    me, ranks = dist.get_rank(job.data), dist.get_world_size(job.data)
    # with ZeRO 1 its owner steps a parameter, else each rank all it has
    owner = [me] * len(parameters)
    if job.plan.zero == 1:
        owner = parts.owners(parameters, ranks)
    mine = [p for p, rank in zip(parameters, owner, strict=True) if rank == me]
    adam = torch.optim.AdamW(mine, lr=lr)
    # with ZeRO the others along dp and cp step other ones
    own = mine if job.plan.zero else None
    adam.register_step_pre_hook(lambda *_: clip_gradients(job.stage, job.mesh, own))
    return adam, owner


def take_step(
    job: Job,
    adam: torch.optim.Optimizer,
    owner: list[int],
    batch: tuple[Tensor, Tensor],
    parts: SimpleNamespace,
    loss_of: Callable,
) -> Tensor:
    """A step on this rank's share of a global batch; returns the mean loss of all shares.

    `loss_of` is as `loss_over` gives it, for the scores that this rank has.
    """
    sizes, mesh = job.plan, job.mesh
    # its share: every dp-th sequence, and of those its positions
    rows = slice(mesh["dp"].get_local_rank(), None, sizes.dp)
    inputs, targets = (part[rows][:, job.places] for part in batch)
    given = inputs, targets, parts.order_of_1f1b, loss_of
    loss = forward_backward(job.model, mesh, *given)
    # the mean gradients, and the step
    if sizes.zero == 1:
        parameters = list(job.stage.parameters())
        parts.sharded_step(parameters, owner, adam, job.data)
    else:
        if sizes.zero == 0:  # with ZeRO 3 backward has averaged
            job.model.finish_gradient_synchronization()
        adam.step()
    job.stage.zero_grad()
    # only the last stage knows the loss, and each rank that of its share
    for name in ("pp", "dp", "cp"):
        dist.all_reduce(loss, group=mesh[name].get_group())
    return loss / (sizes.dp * sizes.cp)


def restore(
    job: Job,
    adam: torch.optim.Optimizer,
    moments: Sequence[nn.Sequential],
    updates: int,
    parts: SimpleNamespace,
) -> None:
    """Give Adam its moments, if any: two more whole models, which are cut as the first."""
    if not moments:
        return
    plan = job.plan._replace(zero=job.plan.zero or 1)  # no DDP: nothing is averaged
    stages = [build_rank(whole, plan, job.mesh, parts).stage for whole in moments]
    held = {p for group in adam.param_groups for p in group["params"]}
    of_each = zip(*(stage.parameters() for stage in (job.stage, *stages)), strict=True)
    for parameter, first, second in of_each:
        if parameter in held:
            state = {"exp_avg": first.data, "exp_avg_sq": second.data}
            adam.state[parameter] = {"step": torch.tensor(float(updates)), **state}


def said(job: Job) -> str:
    """What this rank holds, and what it sends to whom, in three lines or four."""
    numbers = sum(parameter.numel() for parameter in job.stage.parameters())
    layers = ", ".join(type(getattr(one, "module", one)).__name__ for one in job.stage)
    groups = {name: job.mesh[name].get_group() for name in ("tp", "cp", "pp")}
    ranks = {n: dist.get_process_group_ranks(g) for n, g in groups.items()}
    data = dist.get_process_group_ranks(job.data)
    stage, stages = job.mesh["pp"].get_local_rank(), job.plan.pp
    blocks = [layer for layer in job.stage if isinstance(layer, Block)]
    sharing = ""
    if job.plan.ep > 1:
        up = blocks[0].mlp.up
        here = f"{len(up)} of {blocks[0].mlp.experts} experts in each block"
        sharing = f"\nhas {here}, with {dist.get_process_group_ranks(up.group)}"
    return (
        f"holds {numbers:,} numbers: {layers}\n"
        f"adds up activations with ranks {ranks['tp']}, gradients with {data}, and passes "
        f"keys and values around {ranks['cp']}\n"
        f"is stage {stage} of {stages}: activations go along ranks {ranks['pp']}{sharing}"
    )
