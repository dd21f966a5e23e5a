"""Experts and data parallel at once: a mesh of copies × experts."""

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from mgpu_tutorial.experts.exchange import Group
from mgpu_tutorial.experts.parallel import ExpertParallel, Model, run


def average_gradients(model: Model, copies: Group) -> None:
    """Sum over the ranks with a copy, divided by the ranks whose tokens it saw: all."""
    layer = model.experts
    for parameter in (model.below, layer.router):
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    for parameter in (layer.up, layer.down):
        dist.all_reduce(parameter.grad, group=copies)
        parameter.grad /= dist.get_world_size()


def norm_of_all(model: Model, experts: Group) -> Tensor:
    """The norm of the whole gradient, in which each parameter counts once."""
    layer = model.experts
    mine = layer.up.grad.square().sum() + layer.down.grad.square().sum()
    dist.all_reduce(mine, group=experts)  # the experts of one copy
    dense = model.below.grad.square().sum() + layer.router.grad.square().sum()
    return (mine + dense).sqrt()


def step(rank: int, world_size: int, copies: int, k: int = 2, tokens: int = 24) -> dict:
    """The ranks keep `copies` of all 8 experts; output, averaged gradients, their norm."""
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    shape, names = (copies, world_size // copies), ("copies", "experts")
    mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    model = Model(ExpertParallel(8, k, mesh.get_group("experts")))
    found = {"output": run(model, tokens)}
    average_gradients(model, mesh.get_group("copies"))
    found["norm"] = norm_of_all(model, mesh.get_group("experts"))
    return found | {name: p.grad for name, p in model.named_parameters()}
