"""Two dimensions: tensor parallel inside a machine, and fully_shard across machines."""

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from mgpu_tutorial.shared.models import SmallTransformer
from mgpu_tutorial.tensor_parallel.torch_plan import cut_by_plan, plan
from mgpu_tutorial.tensor_parallel.training import (
    Prepared,
    new_batch,
    new_model,
    whole_values,
)


def on_a_mesh(model: SmallTransformer, mesh: DeviceMesh) -> Prepared:
    """First cut the layers along "tp", then shard what is left of them along "dp"."""
    prepared = cut_by_plan(model, mesh["tp"], plan())
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return prepared


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
    prepared = on_a_mesh(new_model(**model), mesh)
    optimizer = torch.optim.Adam(prepared.model.parameters(), lr=0.01)
    for step in range(steps):
        tokens, targets = batch_of_replica(mesh, step)
        optimizer.zero_grad()
        with prepared.context():
            prepared.loss(prepared.model(tokens), targets).backward()
        optimizer.step()
    return prepared.model


def train_on_a_mesh(
    rank: int, world_size: int, shape: tuple[int, int], steps: int = 5, **model: object
) -> dict[str, torch.Tensor]:
    """Train on a mesh (dp, tp); the whole parameters by name, on every rank."""
    return whole_values(take_steps(shape, steps, model))
