"""A checkpoint of many files: each rank writes its part, any number of ranks reads them."""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

ROWS, COLUMNS = 8, 3


def shared_out(table: torch.Tensor, world_size: int) -> DTensor:
    """Rank r keeps the r-th part of the rows, and knows that the others have the rest."""
    mesh = init_device_mesh("cpu", (world_size,))
    return distribute_tensor(table, mesh, [Shard(0)])


def save_rows(rank: int, world_size: int, folder: str) -> list[float]:
    """Every rank writes its own rows to a file of its own; returns their first column."""
    table = torch.arange(float(ROWS * COLUMNS)).reshape(ROWS, COLUMNS)
    weight = shared_out(table, world_size)
    dcp.save({"weight": weight}, checkpoint_id=folder)
    return weight.to_local()[:, 0].tolist()


def load_rows(rank: int, world_size: int, folder: str) -> list[float]:
    """Every rank reads the rows that it needs, whoever wrote them; returns their column."""
    weight = shared_out(torch.zeros(ROWS, COLUMNS), world_size)
    dcp.load({"weight": weight}, checkpoint_id=folder)
    return weight.to_local()[:, 0].tolist()
