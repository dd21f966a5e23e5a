"""A small language model on a plan of one's own: who shares batch, products and layers."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist

from mgpu_tutorial.lab import status
from mgpu_tutorial.language_model import checkpoint
from mgpu_tutorial.language_model.model import BATCH, CONTEXT, batch_of, new_model
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
    average_gradients,
    broadcast_parameters,
    clip_gradients,
    forward_backward,
)
from mgpu_tutorial.long_sequences.ring import zigzag
from mgpu_tutorial.pipelines.stages import order_of_1f1b
from mgpu_tutorial.sharding.zero1 import owners
from mgpu_tutorial.tensor_parallel import layers

OURS = cut_model, order_of_1f1b, owners, zigzag, layers.CopyToRanks, layers.SumOverRanks
OURS += layers.ColumnParallelLinear, layers.RowParallelLinear
PARTS = SimpleNamespace(**{part.__name__: part for part in OURS})


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
    parts: SimpleNamespace = PARTS,
    after_step: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Train up to step number `steps` on a plan such as "dp=2,tp=2"; returns the losses.

    `resume` names a checkpoint of any plan to go on from, `save` a file that is written each
    `every` steps. `parts` are those of OURS that the reader has made. Raises
    ValueError on every rank for a plan that cannot be.
    """
    plan, device, losses = plan_of(plan), torch.get_default_device().type, []
    require_possible(plan, world_size)
    mesh, whole = mesh_of(plan, device), new_model().to(device, getattr(torch, dtype))
    state = checkpoint.load(resume, whole) if resume else {"step": 0, "tensors": {}}
    model = parts.cut_model(whole, mesh, partial(share_products, parts=parts))
    places = parts.zigzag(CONTEXT, mesh["cp"].get_local_rank(), plan.cp).to(device)
    if plan.cp > 1:
        f, g = parts.CopyToRanks.apply, parts.SumOverRanks.apply
        share_sequence(model, places, mesh["cp"].get_group(), f, g)
    parameters, me = list(model.parameters()), mesh["dp"].get_local_rank()
    owner = parts.owners(parameters, plan.dp) if plan.zero else [me] * len(parameters)
    mine = [p for p, who in zip(parameters, owner, strict=True) if who == me]
    adam = torch.optim.AdamW(mine, lr=lr)
    checkpoint.put_moments(model, adam, mesh, state)
    print(said(plan, model, mesh))
    for step in range(state["step"], steps):
        inputs, targets = (part.to(device) for part in batch_of(step, BATCH))
        share = slice(me, None, plan.dp)  # every dp-th sequence
        batch = inputs[share][:, places], targets[share][:, places]
        loss = forward_backward(model, mesh, *batch, parts.order_of_1f1b)
        average_gradients(model, mesh)
        clip_gradients(model, mesh)
        adam.step()
        if plan.zero:
            broadcast_parameters(model, mesh, owner)
        model.zero_grad()
        for name in ("pp", "dp", "cp"):  # only the last stage knows it, of its own share
            dist.all_reduce(loss, group=mesh[name].get_group())
        losses.append(loss.item() / plan.dp / plan.cp)
        status(f"step {step + 1} of {steps}, loss {losses[-1]:.3f}")
        if save and (step + 1) % every == 0:
            checkpoint.save(save, model, adam, mesh, step + 1)
        after_step(step)
    return losses


train.ranks_for = lambda plan="dp=2", **_: plan_of(plan).ranks  # for the command line
