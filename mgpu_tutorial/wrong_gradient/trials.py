"""Three tests of a job's gradients: against one process, copy by copy, on twice the ranks."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy

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


def gathered(own: Gradients, dimension: DeviceMesh) -> list[Gradients]:
    """What each rank along a dimension of the mesh has, in their order, on the CPU."""
    every = [None] * dimension.size()
    own = {
        name: None if gradient is None else gradient.cpu() for name, gradient in own.items()
    }
    dist.all_gather_object(every, own, group=dimension.get_group())
    return every


def whole_gradients(stage: nn.Sequential, mesh: DeviceMesh, first: int = 0) -> Gradients:
    """The gradients of the whole model under the names of one process, on every rank.

    `stage` holds the layers from number `first` on; a parameter with an attribute `cut` is a
    shard along that dimension. Raises ValueError, on every rank of its tp and pp groups, for
    a parameter that has no gradient on one of them, for a layer that two stages have, as
    where `first` is forgotten, and for a mesh without tp or pp.
    """
    if missing := [name for name in ("tp", "pp") if name not in (mesh.mesh_dim_names or ())]:
        raise ValueError(
            f"the mesh has {mesh.mesh_dim_names}, and no {' and '.join(missing)}: make it "
            "with both, of one rank where nothing is shared"
        )
    if not isinstance(stage, nn.Sequential):
        raise TypeError(
            f"the stage is {type(stage).__name__}, whose layers have no numbers: give the "
            "Sequential of them"
        )
    own = {name: p.grad for name, p in stage.named_parameters()}
    shards, mine = gathered(own, mesh["tp"]), {}
    for name, parameter in stage.named_parameters():
        parts = [other[name] for other in shards]
        is_everywhere = all(part is not None for part in parts)
        is_shard = is_everywhere and hasattr(parameter, "cut")
        layer, rest = name.split(".", 1)
        whole = torch.cat(parts, parameter.cut) if is_shard else own[name]
        mine[f"{int(layer) + first}.{rest}"] = whole if is_everywhere else None
    stages = gathered(mine, mesh["pp"])
    require_apart(stages)
    every = {name: gradient for layers in stages for name, gradient in layers.items()}
    if lacking := [name for name, gradient in every.items() if gradient is None]:
        raise ValueError(f"{lacking[0]} has no gradient: is it frozen, or unused?")
    return every


def require_apart(stages: list[Gradients]) -> None:
    """ValueError where two stages have a parameter of the same name."""
    seen: dict[str, int] = {}
    for number, stage in enumerate(stages):
        for name in stage:
            if name in seen:
                raise ValueError(
                    f"stages {seen[name]} and {number} both have {name}: give `first`, the "
                    "number of the stage's first layer"
                )
            seen[name] = number


def copies_that_differ(stage: nn.Sequential, mesh: DeviceMesh, first: int = 0) -> list[str]:
    """The gradients that should have the same bits on several ranks, and have not."""
    mine = {}
    for name, p in stage.named_parameters():
        layer, rest = name.split(".", 1)
        part = mesh["tp"].get_local_rank() if hasattr(p, "cut") else "whole"
        given = [] if p.grad is None else [p.grad]  # none is refused later, on all ranks
        mine[f"{int(layer) + first}.{rest}", part] = fingerprint_of(given)
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
    faulty, number = job_with(fault), dtype_of(dtype)
    require_norm(most)
    mesh, (x, targets) = job.mesh_of(plan, world_size), job.batch_of()
    stage, first = faulty.stage_of(job.new_model(random).to(number), mesh)
    loss, norm = faulty.step(stage, mesh, (x.to(number), targets), most)
    differ = copies_that_differ(stage, mesh, first)
    return Trial(loss, norm, whole(stage, mesh, first), differ)


def require_norm(most: float) -> None:
    """ValueError for a norm that would turn gradients around, or make them nothing."""
    if not most > 0:
        raise ValueError(f"{most=}: expected the largest norm of the gradients, above 0")


def dtype_of(name: str) -> torch.dtype:
    """One of DTYPES by its name; ValueError for another."""
    if name not in DTYPES:
        raise ValueError(f"dtype={name!r}: expected one of {', '.join(DTYPES)}")
    return DTYPES[name]


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
    `times` as far off as that moves it. None where all are near. `gradients_of` gives the
    same twice: dropout that draws anew would count as rounding, and hide everything.
    Tokens have no last place: give their embeddings, and gradients that begin with them.
    """
    if not x.is_floating_point():
        raise TypeError(
            f"x is {x.dtype}, of which no last place can be moved: give what the first layer "
            "computes with, such as the embeddings of the tokens"
        )
    right = gradients_of(x)
    if found.keys() != right.keys():
        raise ValueError(f"{sorted(found)} are compared with {sorted(right)}")
    for name, gradient in right.items():
        shape = getattr(found[name], "shape", None)
        if shape != gradient.shape:
            raise ValueError(f"{name}: {shape} is compared with {gradient.shape}")
    moved = gradients_of(torch.nextafter(x, torch.full_like(x, math.inf)))
    moves = {name: (moved[name] - right[name]).double().norm() for name in right}
    if not any(moves.values()):
        raise ValueError(
            "no gradient moved with x, so there is no limit: give a batch that they depend "
            "on, not zeros, and of a model that is used twice clones of its .grad"
        )
    for name in reversed(right):
        limit = times * moves[name]
        if not (found[name] - right[name]).double().norm() <= limit:  # NaN is never near
            return name
    return None
