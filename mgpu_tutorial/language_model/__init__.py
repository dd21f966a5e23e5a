"""A small language model on a plan of one's own: who shares batch, products and layers."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist

from mgpu_tutorial.lab import status
from mgpu_tutorial.language_model import checkpoint
from mgpu_tutorial.language_model.model import CONTEXT, batch_of, new_model
from mgpu_tutorial.language_model.plan import (
    cut_model,
    mesh_of,
    plan_of,
    require_possible,
    said,
    share_products,
    share_sequence,
)
from mgpu_tutorial.language_model.steps import (
    Adam,
    average_gradients,
    clip_gradients,
    forward_backward,
)
from mgpu_tutorial.long_sequences.dealing import zigzag
from mgpu_tutorial.pipelines.stages import order_of_1f1b
from mgpu_tutorial.sharding.zero1 import owners
from mgpu_tutorial.tensor_parallel.layers import (
    ColumnParallelLinear,
    CopyToRanks,
    RowParallelLinear,
    SumOverRanks,
)

BATCH, MICRO_BATCHES = 16, 2
LAYERS = ColumnParallelLinear, RowParallelLinear, CopyToRanks, SumOverRanks
OURS = cut_model, *LAYERS, order_of_1f1b, owners, zigzag


def train(
    rank: int,
    world_size: int,
    plan: str = "dp=2",
    steps: int = 20,
    resume: str = "",
    save: str = "",
    every: int = 10,
    dtype: str = "float32",
    lr: float = 1e-3,
    parts: SimpleNamespace | None = None,
    after_step: Callable[[int], None] | None = None,
) -> list[float]:
    """Train up to step number `steps` on a plan such as "dp=2,tp=2"; returns the losses.

    `resume` names a checkpoint of any plan to go on from, `save` a file that is written each
    `every` steps. `parts` are those of OURS that the reader has made. Raises
    ValueError on every rank for a plan that cannot be.
    """
    plan, parts = plan_of(plan), parts or SimpleNamespace(**{p.__name__: p for p in OURS})
    require_possible(plan, world_size, BATCH, MICRO_BATCHES)
    device, losses = torch.get_default_device().type, []
    mesh, whole = mesh_of(plan, device), new_model().to(device, getattr(torch, dtype))
    state = checkpoint.load(resume) if resume else {"step": 0}
    if resume:
        checkpoint.put_parameters(whole, state)
    model = parts.cut_model(whole, mesh, partial(share_products, parts=parts))
    places = parts.zigzag(CONTEXT, mesh["cp"].get_local_rank(), plan.cp).to(device)
    if plan.cp > 1:
        f, g = parts.CopyToRanks.apply, parts.SumOverRanks.apply
        share_sequence(model, places, mesh["cp"].get_group(), f, g)
    who = parts.owners(list(model.parameters()), plan.dp) if plan.zero else None
    adam = Adam(model, mesh, lr, who)
    if resume:
        checkpoint.put_moments(model, adam, mesh, state)
    print(said(plan, model, mesh))
    for step in range(state["step"], steps):
        inputs, targets = (part.to(device) for part in batch_of(step, BATCH))
        share = slice(mesh["dp"].get_local_rank(), None, plan.dp)  # every dp-th sequence
        batch = inputs[share][:, places], targets[share][:, places]
        order = parts.order_of_1f1b
        loss = forward_backward(model, mesh, *batch, MICRO_BATCHES, order)
        average_gradients(model, mesh)
        clip_gradients(model, mesh)
        adam.step()
        for name in ("pp", "dp", "cp"):  # only the last stage knows it, of its own share
            dist.all_reduce(loss, group=mesh[name].get_group())
        losses.append(loss.item() / plan.dp / plan.cp)
        status(f"step {step + 1} of {steps}, loss {losses[-1]:.3f}")
        if save and (step + 1) % every == 0:
            checkpoint.save(save, checkpoint.whole_state(model, adam, mesh, step + 1))
        if after_step:
            after_step(step)
    return losses


def _ranks_for(plan: str = "dp=2", **_: object) -> int:
    """How many ranks the command line starts for a plan."""
    return plan_of(plan).ranks


train.ranks_for = _ranks_for
