"""PyTorch's own: a plan names the layers and how each is cut; `fully_shard` goes around."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.functional import cross_entropy

from mgpu_tutorial.shared.models import SmallTransformer


def plan() -> dict[str, ParallelStyle]:
    """The same cuts as ours."""
    return {
        "token": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }


def on_a_mesh(model: SmallTransformer, mesh: DeviceMesh) -> SmallTransformer:
    """First cut the layers along "tp", then shard what is left of them along "dp"."""
    parallelize_module(model, mesh["tp"], plan())
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def step_on_a_mesh(model: SmallTransformer, mesh: DeviceMesh, *batch: torch.Tensor) -> None:
    """Forward and backward of `batch`; the ranks of a "tp" group read the same sequences."""
    replicas, replica = mesh["dp"].size(), mesh["dp"].get_local_rank()
    tokens, targets = (part.chunk(replicas)[replica] for part in batch)
    with loss_parallel():
        logits = model(tokens)
        cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
