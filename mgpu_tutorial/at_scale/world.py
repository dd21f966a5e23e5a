"""The real code of one rank of 16,384: tensor parallel inside a node, `fully_shard` across.

Which calls a rank makes and on how many bytes follows from shapes, so one process can find
out with `pretend`, which takes it for rank 0 of as many as we like.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from mgpu_tutorial.shared.models import SmallTransformer


def share_out(model: SmallTransformer, mesh: DeviceMesh) -> None:
    """Cut each block's matrices over `tp`, and what is left of them over `dp`.

    Each pair of products is cut by columns and then by rows, and added up once at its end.
    The first entry lets query, key and value add up their gradients together.
    """
    alike = {"input_layouts": Replicate(), "desired_input_layouts": Replicate()}
    shared = {
        "attention": PrepareModuleInput(**alike),
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], shared)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def steps_of_one_rank(
    rank: int,
    world_size: int,
    share: Callable[[SmallTransformer, DeviceMesh], None],
    mesh: tuple[int, int, int],
    steps: int = 1,
) -> dict[str, int]:
    """Steps of one stage on 64 tokens, in a world of PP · DP · TP ranks, as in `mesh`."""
    mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("pp", "dp", "tp"))
    stage = SmallTransformer(vocabulary=512, width=1024, heads=8, depth=2)
    whole = sum(p.numel() for p in stage.parameters())
    share(stage, mesh)
    mine = sum(p.to_local().numel() for p in stage.parameters())
    tokens = torch.zeros(1, 64, dtype=torch.long)
    for _ in range(steps):
        logits = stage(tokens).flatten(0, 1)
        nn.functional.cross_entropy(logits, tokens.flatten()).backward()
    return {"of the stage": whole, "on this rank": mine}
