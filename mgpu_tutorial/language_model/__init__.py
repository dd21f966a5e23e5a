"""A small language model on a plan of one's own: who shares batch, products and layers."""

from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mgpu_tutorial.ddp_in_practice.practice import AccumulatingDDP
from mgpu_tutorial.experts.parallel import combine, dispatch
from mgpu_tutorial.lab import span, status
from mgpu_tutorial.language_model import model as models
from mgpu_tutorial.language_model import plan as plans
from mgpu_tutorial.language_model.rank import build_rank, new_adam, restore, said, take_step
from mgpu_tutorial.long_sequences.ring import ring_attention, zigzag
from mgpu_tutorial.pipelines.stages import order_of_1f1b
from mgpu_tutorial.sharding.blocks import fully_sharded
from mgpu_tutorial.sharding.zero import owners, sharded_step
from mgpu_tutorial.shared.guards import one_of, positive, whole
from mgpu_tutorial.tensor_parallel import layers
from mgpu_tutorial.tensor_parallel_in_practice.vocabulary import parallel_cross_entropy

OURS = plans.cut_model, new_adam, take_step, AccumulatingDDP, order_of_1f1b
OURS += owners, sharded_step, fully_sharded, zigzag, ring_attention
OURS += layers.ColumnParallelLinear, layers.RowParallelLinear, parallel_cross_entropy
OURS += dispatch, combine
PARTS = SimpleNamespace(**{part.__name__: part for part in OURS})


DTYPES = "float32", "float64", "bfloat16"


def require_run(begin: int, steps: int, save: str, every: int, dtype: str, lr: float) -> None:
    """ValueError for a run that would train nothing, or whose result could not be saved."""
    whole("every", every)
    one_of("dtype", dtype, DTYPES)
    positive("lr", lr)
    if not steps > begin:
        raise ValueError(f"steps={steps}, and {begin} are done: ask for more steps in all")
    if save:
        models.make_place(save)


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
    text: Tensor | None = None,
    experts: int = 0,
) -> list[float]:
    """Train up to step number `steps` on a plan such as "dp=2,tp=2"; returns the losses.

    `resume` names a checkpoint of any plan to go on from, `save` a file that is written each
    `every` steps and after the last. `parts` are those of OURS that the reader has made, and
    `loss_of` gives the mean loss of scores (rows, 96) and targets (rows). `text` is a text of
    one's own, as `encode` gives it, instead of PyTorch's documentation. With `experts` each
    block has so many instead of its MLP.
    Raises ValueError on every rank, before anything is sent, for what cannot be.
    """
    sizes, device = plans.plan_of(plan, world_size, experts), torch.get_default_device().type
    # the whole model, new or from a file, perhaps with Adam's moments as two more models
    begin, updates, wholes = 0, 0, [models.new_model(experts)]
    if resume:
        begin, updates, wholes = models.resumed(resume, experts)
    require_run(begin, steps, save, every, dtype, lr)
    model, *moments = [one.to(device, getattr(torch, dtype)) for one in wholes]
    # this rank's part of it, and its optimizer
    job = build_rank(model, sizes, plans.mesh_of(sizes), parts)
    adam, owner = parts.new_adam(job, parts, lr)
    restore(job, adam, moments, updates, parts)
    print(said(job))
    # the steps
    loss_of = plans.loss_over(job.mesh["tp"].get_group(), loss_of, parts)
    losses = []
    for step in range(begin, steps):
        batch = [part.to(device) for part in models.batch_of(step, text)]
        with span(f"step {step}"):
            loss = parts.take_step(job, adam, owner, batch, parts, loss_of)
        losses.append(loss.item())
        status(f"step {step + 1} of {steps}, loss {losses[-1]:.3f}")
        if save and ((step + 1) % every == 0 or step + 1 == steps):
            models.save_checkpoint(save, job.stage, adam, job.mesh, step + 1)
        after_step(step)
    return losses


train.ranks_for = lambda plan="dp=2", **_: plans.plan_of(plan).ranks  # for the command line
