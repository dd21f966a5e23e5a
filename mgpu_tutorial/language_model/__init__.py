"""A small language model on a plan of one's own: who shares batch, products and layers."""

import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab import status
from mgpu_tutorial.language_model import model as models
from mgpu_tutorial.language_model import plan as plans
from mgpu_tutorial.long_sequences.ring import zigzag
from mgpu_tutorial.pipelines.stages import order_of_1f1b
from mgpu_tutorial.sharding.zero import owners
from mgpu_tutorial.shared.losses import require_mean_of_parts
from mgpu_tutorial.tensor_parallel import layers

OURS = plans.cut_model, order_of_1f1b, owners, zigzag, layers.CopyToRanks, layers.SumOverRanks
OURS += layers.ColumnParallelLinear, layers.RowParallelLinear
PARTS = SimpleNamespace(**{part.__name__: part for part in OURS})


DTYPES = "float32", "float64", "bfloat16"


def require_run(
    begin: int,
    steps: int,
    save: str,
    every: int,
    dtype: str,
    lr: float,
    parts: SimpleNamespace,
    loss_of: Callable,
) -> None:
    """ValueError for a run that would train nothing, or whose result could not be saved."""
    for name, number in {"steps": steps, "every": every}.items():
        if not isinstance(number, int):
            raise ValueError(f"{name}={number!r}: expected a whole number of steps")
    if not steps > begin:
        raise ValueError(f"steps={steps}, and {begin} are done: ask for more steps in all")
    if every < 1:
        raise ValueError(f"every={every}: expected a number of steps, 1 or more")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: expected one of {', '.join(DTYPES)}")
    if not (isinstance(lr, float | int) and 0 < lr < math.inf):
        raise ValueError(f"lr={lr!r}: expected a number above 0, and not infinite")
    missing = [name for name in vars(PARTS) if not hasattr(parts, name)]
    if missing:
        raise ValueError(f"parts lack {', '.join(missing)}: `library(*OURS)` has them all")
    targets = models.batch_of(begin)[1].to(torch.get_default_device())
    each = targets.flatten().split(1)
    require_mean_of_parts(loss_of, (1, 96), [(target, target) for target in each])
    if save:
        models.require_place(save)


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
    loss_of: Callable = cross_entropy,
) -> list[float]:
    """Train up to step number `steps` on a plan such as "dp=2,tp=2"; returns the losses.

    `resume` names a checkpoint of any plan to go on from, `save` a file that is written each
    `every` steps and after the last. `parts` are those of OURS that the reader has made, and
    `loss_of` gives the mean loss of scores (rows, 96) and targets (rows).
    Raises ValueError on every rank, before anything is sent, for what cannot be.
    """
    plan, device = plans.plan_of(plan, world_size), torch.get_default_device().type
    begin, updates, wholes = 0, 0, [models.new_model()]
    if resume:
        begin, updates, wholes = models.load_checkpoint(resume)
    require_run(begin, steps, save, every, dtype, lr, parts, loss_of)
    mesh, share = plans.mesh_of(plan), partial(plans.share_products, parts=parts)
    wholes = [whole.to(device, getattr(torch, dtype)) for whole in wholes]
    model, *moments = [parts.cut_model(whole, mesh, share) for whole in wholes]
    places = parts.zigzag(models.CONTEXT, mesh["cp"].get_local_rank(), plan.cp).to(device)
    if plan.cp > 1:
        plans.share_sequence(model, places, mesh["cp"].get_group(), parts)
    parameters, me = list(model.parameters()), mesh["dp"].get_local_rank()
    owner = parts.owners(parameters, plan.dp) if plan.zero else [me] * len(parameters)
    mine = [i for i, who in enumerate(owner) if who == me]
    adam = torch.optim.AdamW([parameters[i] for i in mine], lr=lr)
    if moments:
        first, second = (list(part.parameters()) for part in moments)
        for i in mine:
            state = {"exp_avg": first[i].data, "exp_avg_sq": second[i].data}
            adam.state[parameters[i]] = {"step": torch.tensor(float(updates)), **state}
    print(plans.said(plan, model, mesh))
    losses = []
    for step in range(begin, steps):
        inputs, targets = (part.to(device) for part in models.batch_of(step))
        share = slice(me, None, plan.dp)  # every dp-th sequence
        batch = inputs[share][:, places], targets[share][:, places]
        loss = plans.forward_backward(model, mesh, *batch, parts.order_of_1f1b, loss_of)
        plans.average_gradients(model, mesh)
        plans.clip_gradients(model, mesh)
        adam.step()
        if plan.zero:  # rank owner[i] of each dp group has stepped parameter i
            for parameter, source in zip(parameters, owner, strict=True):
                dist.broadcast(parameter.data, group=mesh["dp"].get_group(), group_src=source)
        model.zero_grad()
        for name in ("pp", "dp", "cp"):  # only the last stage knows it, of its own share
            dist.all_reduce(loss, group=mesh[name].get_group())
        losses.append(loss.item() / plan.dp / plan.cp)
        status(f"step {step + 1} of {steps}, loss {losses[-1]:.3f}")
        if save and ((step + 1) % every == 0 or step + 1 == steps):
            models.save_checkpoint(save, model, adam, mesh, step + 1)
        after_step(step)
    return losses


train.ranks_for = lambda plan="dp=2", **_: plans.plan_of(plan).ranks  # for the command line
