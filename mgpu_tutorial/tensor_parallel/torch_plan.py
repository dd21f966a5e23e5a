"""PyTorch's own: a plan says by name which layer is cut how, for `parallelize_module`."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from mgpu_tutorial.shared.models import SmallTransformer
from mgpu_tutorial.tensor_parallel.product import A, B, X
from mgpu_tutorial.tensor_parallel.training import Prepared, flat_cross_entropy


def plan() -> dict[str, ParallelStyle]:
    """The same cuts as ours."""
    return {
        "token": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate()
        ),
        "blocks.*.attention.query": ColwiseParallel(),
        "blocks.*.attention.key": ColwiseParallel(),
        "blocks.*.attention.value": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }


def plan_with_sequence() -> dict[str, ParallelStyle]:
    """What changes with slices of the sequence, dimension 1, between the pieces."""
    sliced = {"input_layouts": Shard(1), "desired_input_layouts": Replicate()}
    return plan() | {
        "blocks.0": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True
        ),
        "blocks.*.attention_norm": SequenceParallel(use_local_output=True),
        "blocks.*.attention": PrepareModuleInput(**sliced),
        "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.mlp_norm": SequenceParallel(use_local_output=True),
        "blocks.*.mlp": PrepareModuleInput(**sliced),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(use_local_output=True),
        "head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }


def cut_by_plan(
    model: SmallTransformer, mesh: DeviceMesh, plan: dict[str, ParallelStyle]
) -> Prepared:
    """Cut a model over a mesh of one dimension; the loss is computed in pieces too."""
    tied = model.head.weight is model.token.weight
    parallelize_module(model, mesh, plan)
    if tied:  # both got a parameter of their own
        model.head.weight = model.token.weight
    return Prepared(model, flat_cross_entropy, context=loss_parallel)


def by_torch(model: SmallTransformer) -> Prepared:
    """Tensor parallel over all ranks by PyTorch."""
    return cut_by_plan(model, all_ranks(), plan())


def by_torch_in_slices(model: SmallTransformer) -> Prepared:
    """Tensor and sequence parallel over all ranks by PyTorch."""
    return cut_by_plan(model, all_ranks(), plan_with_sequence())


def all_ranks() -> DeviceMesh:
    """A mesh of one dimension with every rank."""
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))


def multiply_by_placements(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """The product of `product.multiply`: of each matrix its placement, and what is here."""
    mesh = all_ranks()
    x = distribute_tensor(X, mesh, [Replicate()])
    a = distribute_tensor(A, mesh, [Shard(1)])  # by columns
    b = distribute_tensor(B, mesh, [Shard(0)])  # by rows
    hidden = x @ a
    part = hidden @ b
    result = part.redistribute(mesh, [Replicate()])  # the all-reduce
    held = {"X": x, "A": a, "X A": hidden, "B": b, "X A B": part, "result": result}
    return {f"{name}: {t.placements[0]!r}": t.to_local() for name, t in held.items()}
