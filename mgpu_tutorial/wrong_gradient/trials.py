"""Three tests of a job's gradients: against one process, copy by copy, on twice the ranks."""

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_map_only  # noqa: PLC2701

from mgpu_tutorial.shared.parameters import fingerprint_of
from mgpu_tutorial.wrong_gradient import job
from mgpu_tutorial.wrong_gradient.faults import job_with

Gradients = dict[str, Tensor]
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


class Trial(NamedTuple):
    """Of a step: the loss, the norm before the clip, whole gradients, copies that differ."""

    loss: float
    norm: float
    gradients: Gradients
    differ: list[str]


def gathered(own: object, group: dist.ProcessGroup) -> list:
    """What each rank of a group has, in their order; tensors come over the CPU."""
    own = tree_map_only(Tensor, Tensor.cpu, own)
    every = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group=group)
    return every


def renumbered(name: str, first: int) -> str:
    """A parameter's name in the whole model; the first number in it is that of its layer."""
    return re.sub(r"\b\d+\b", lambda number: str(int(number[0]) + first), name, count=1)


def whole_gradients(stage: nn.Module, mesh: DeviceMesh, first: int = 0) -> Gradients:
    """The gradients of the whole model under the names of one process, on every rank.

    `stage` holds the layers from number `first` on. A parameter with an attribute `cut` is a
    shard along that dimension, of which the ranks of its `group` have the others; a frozen
    one has no gradient. Raises ValueError on every rank for a gradient that one of them
    lacks, and for a name that two stages have, as where `first` is forgotten.
    """
    trained = {n: p for n, p in stage.named_parameters() if p.requires_grad}
    mine = {}
    for name, parameter in trained.items():
        value = parameter.grad
        if hasattr(parameter, "cut"):
            parts = gathered(value, parameter.group)
            lacks = any(part is None for part in parts)
            value = None if lacks else torch.cat(parts, parameter.cut)
        mine[renumbered(name, first)] = value
    stages = gathered(mine, mesh["pp"].get_group())
    every = {name: g for layers in stages for name, g in layers.items()}
    if len(every) < sum(map(len, stages)):
        raise ValueError(f"two stages have the same name: is `first` {first}?")
    lacking = [name for name, gradient in every.items() if gradient is None]
    for others in gathered(lacking, dist.group.WORLD):
        if others:
            raise ValueError(f"{others[0]} has no gradient")
    return every


def kind_on_ranks(
    ranks: Sequence[Tensor], right: Tensor, limit: float, groups: dict[str, list[list[int]]]
) -> str:
    """What is missing in the ranks' gradients of a parameter: a sum, or some rows.

    `groups` has by its name each dimension of the mesh: which ranks belong together. Other
    kinds are those that the chapter distributed_sgd names.
    """

    def near(found: Tensor, expected: Tensor) -> bool:
        return (found - expected).norm() <= limit

    for name, members in groups.items():
        sums = [sum(ranks[rank] for rank in group) for group in members]
        if all(near(total, right) for total in sums):
            return f"never summed over {name}"
    rows = zip(ranks[0], right, strict=True)
    count = sum(1 for own, expected in rows if near(own, expected))
    if 0 < count < len(right):
        return f"right in {count} of {len(right)} rows"
    return "neither"


def copies_that_differ(stage: nn.Module, first: int = 0) -> list[str]:
    """The gradients that should have the same bits on several ranks, and have not."""
    mine = {}
    for name, p in stage.named_parameters():
        part = dist.get_rank(p.group) if hasattr(p, "cut") else "whole"
        given = [] if p.grad is None else [p.grad]  # none is refused later, on all ranks
        mine[renumbered(name, first), part] = fingerprint_of(given)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    bits = {}
    for key, digits in (pair for own in everyone for pair in own.items()):
        bits.setdefault(key, set()).add(digits)
    return sorted({name for (name, _), several in bits.items() if len(several) > 1})


def one_step(
    rank: int,
    world_size: int,
    plan: str,
    fault: str = "",
    most: float = math.inf,
    dtype: str = "float64",
    random: bool = False,
    whole: Callable = whole_gradients,
) -> Trial:
    """One step of the job on a plan, with a fault or none; every rank returns all of it."""
    faulty, number = job_with(fault), DTYPES[dtype]
    mesh, (x, targets) = job.mesh_of(plan, world_size), job.batch_of()
    stage, first = faulty.stage_of(job.new_model(random).to(number), mesh)
    loss, norm = faulty.step(stage, mesh, (x.to(number), targets), most)
    differ = copies_that_differ(stage, first)
    return Trial(loss, norm, whole(stage, mesh, first), differ)


def alone(x: Tensor, targets: Tensor, random: bool = False) -> Gradients:
    """The gradients of one process, which shares nothing with the job but the model."""
    model = job.new_model(random).to(x.dtype)
    scores = model(x).flatten(0, 1)
    cross_entropy(scores, targets.flatten(), ignore_index=job.NOTHING).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def first_difference(
    found: Gradients, gradients_of: Callable, x: Tensor, times: float = 4.0
) -> str | None:
    """The first gradient, on the way backward, that is further off than rounding explains.

    `gradients_of(x)` are those of one process, in the order of its layers; the batch `x` is
    disturbed by a unit in the last place of each number, and a gradient of `found` can be
    `times` as far off as that moves it, or as a unit in its own last place. None where all
    are near. `gradients_of` gives the same twice, so without dropout. `x` has the coarsest
    dtype in which the model computes. Tokens have no last place: give their embeddings.
    """
    if not x.is_floating_point():
        raise TypeError(f"x is {x.dtype}, which has no last place: give embeddings")
    right = gradients_of(x)
    if found.keys() != right.keys():
        raise ValueError(f"only one of the two has {found.keys() ^ right.keys()}")
    moved = gradients_of(torch.nextafter(x, torch.full_like(x, math.inf)))
    for name in reversed(right):
        eps = torch.finfo(right[name].dtype).eps
        unit = eps * right[name].double().norm()
        limit = times * max((moved[name] - right[name]).double().norm(), unit)
        distance = (found[name] - right[name]).double().norm()
        if not distance <= limit:  # a NaN is never near
            return name
    return None
