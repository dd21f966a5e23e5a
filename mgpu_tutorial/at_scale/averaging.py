"""Less over slow links: an all-reduce that knows its nodes, and models averaged seldom."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


def hierarchical(tensor: torch.Tensor, mesh: DeviceMesh) -> None:
    """Sum `tensor` in place over all ranks of a mesh of nodes: "across" and "inside" them.

    Across the nodes each rank meets those of its own place, so every GPU uses its own
    network card. The GPUs of a node must divide the length of `tensor`.
    """
    gpus = mesh["inside"].size()
    if len(tensor) % gpus:
        raise ValueError(f"{len(tensor)} numbers have no {gpus} equal parts: pad the tensor")
    inside, across = mesh["inside"].get_group(), mesh["across"].get_group()
    mine = tensor.new_empty(len(tensor) // gpus)
    dist.reduce_scatter_single(mine, tensor, group=inside)  # the node's sum of one part
    dist.all_reduce(mine, group=across)  # the sum of all nodes, of this part only
    dist.all_gather_single(tensor, mine, group=inside)


def sum_by_node(rank: int, world_size: int, per_node: int, count: int) -> torch.Tensor:
    """Sum 0, 1, 2, … plus the rank over all ranks, `count` numbers, and return the sums."""
    if world_size % per_node:
        raise ValueError(f"{world_size} ranks do not fill nodes of {per_node}")
    sizes = world_size // per_node, per_node
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("across", "inside"))
    tensor = torch.arange(count, dtype=torch.float64) + rank
    hierarchical(tensor, mesh)
    return tensor


def local_sgd(rank: int, world_size: int, every: int, data: torch.Tensor) -> torch.Tensor:
    """SGD on this rank's `data`; every so many steps all ranks average their parameters.

    `data` has a row for each rank: (ranks, steps, batch, 16).
    """
    if data.shape[1] % every:
        raise ValueError(f"{data.shape[1]} steps do not end with an average, every {every}")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for step, x in enumerate(data[rank], 1):
        sgd.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        sgd.step()
        if step % every == 0:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= world_size
    return nn.utils.parameters_to_vector(model.parameters()).detach()
