"""An all-reduce that knows which ranks share a node, out of three collectives."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def hierarchical(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Sum `tensor` in place over all ranks of a mesh of nodes: "across" and "inside" them.

    Across the nodes each rank meets those of its own place, so every GPU uses its own
    network card. The GPUs of a node must divide the length of `tensor`.
    """
    inside, across = mesh["inside"].get_group(), mesh["across"].get_group()
    mine = tensor.new_empty(len(tensor) // mesh["inside"].size())
    dist.reduce_scatter_single(mine, tensor, group=inside)  # the node's sum of one part
    dist.all_reduce(mine, group=across)  # the sum of all nodes, of this part only
    dist.all_gather_single(tensor, mine, group=inside)


def sum_by_node(rank: int, world_size: int, per_node: int, count: int) -> float:
    """All-reduce `count` numbers that depend on the rank; returns the largest error here."""
    sizes = world_size // per_node, per_node
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("across", "inside"))
    tensor = torch.arange(count, dtype=torch.float64) + rank
    hierarchical(tensor, mesh)
    every = torch.arange(count, dtype=torch.float64) * world_size
    return (tensor - every - sum(range(world_size))).abs().max().item()
