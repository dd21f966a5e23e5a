"""PyTorch's own: a plan says by name which layer is cut how, for `parallelize_module`.

On a mesh of two dimensions that is one, inside a machine; `fully_shard` is the other.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
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
from mgpu_tutorial.tensor_parallel.layers import A, B, X
from mgpu_tutorial.tensor_parallel.training import (
    Trainable,
    flat_cross_entropy,
    new_batch,
    new_model,
    whole_values,
)


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
) -> Trainable:
    """Cut a model over a mesh of one dimension; the loss is computed in pieces too."""
    tied = model.head.weight is model.token.weight
    parallelize_module(model, mesh, plan)
    if tied:  # both got a parameter of their own
        model.head.weight = model.token.weight
    return Trainable(model, flat_cross_entropy, context=loss_parallel)


def by_torch(model: SmallTransformer) -> Trainable:
    """Tensor parallel over all ranks by PyTorch."""
    return cut_by_plan(model, all_ranks(), plan())


def by_torch_in_slices(model: SmallTransformer) -> Trainable:
    """Tensor and sequence parallel over all ranks by PyTorch."""
    return cut_by_plan(model, all_ranks(), plan_with_sequence())


def all_ranks() -> DeviceMesh:
    """A mesh of one dimension with every rank."""
    device = "cuda" if "nccl" in dist.get_backend() else "cpu"
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("tp",))


def multiply_by_placements(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """The product of `layers.multiply`: of each matrix its placement, and what is here."""
    mesh = all_ranks()
    x = distribute_tensor(X, mesh, [Replicate()])
    a = distribute_tensor(A, mesh, [Shard(1)])  # by columns
    b = distribute_tensor(B, mesh, [Shard(0)])  # by rows
    hidden = x @ a
    part = hidden @ b
    result = part.redistribute(mesh, [Replicate()])  # the all-reduce
    held = {"X": x, "A": a, "X A": hidden, "B": b, "X A B": part, "result": result}
    return {f"{name}: {t.placements[0]!r}": t.to_local() for name, t in held.items()}


# Two dimensions


def on_a_mesh(model: SmallTransformer, mesh: DeviceMesh) -> Trainable:
    """First cut the layers along "tp", then shard what is left of them along "dp"."""
    trainable = cut_by_plan(model, mesh["tp"], plan())
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return trainable


def batch_of_replica(mesh: DeviceMesh, step: int) -> list[torch.Tensor]:
    """Two sequences for each replica: all ranks of one "tp" group read the same."""
    replicas, replica = mesh["dp"].size(), mesh["dp"].get_local_rank()
    batch = new_batch(step, sequences=2 * replicas)
    return [part.chunk(replicas)[replica] for part in batch]


def take_steps(
    shape: tuple[int, int], steps: int, model: dict[str, object]
) -> SmallTransformer:
    """Train a new model on a mesh (dp, tp) of all ranks."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    trainable = on_a_mesh(new_model(**model), mesh)
    optimizer = torch.optim.Adam(trainable.model.parameters(), lr=0.01)
    for step in range(steps):
        tokens, targets = batch_of_replica(mesh, step)
        optimizer.zero_grad()
        with trainable.context():
            trainable.loss(trainable.model(tokens), targets).backward()
        optimizer.step()
    return trainable.model


def train_on_a_mesh(
    rank: int, world_size: int, shape: tuple[int, int], steps: int = 5, **model: object
) -> dict[str, torch.Tensor]:
    """Train on a mesh (dp, tp); the whole parameters by name, on every rank."""
    return whole_values(take_steps(shape, steps, model))
