"""The real code of one rank of 16,384: tensor parallel inside a node, `fully_shard` across.

Which calls a rank makes and on how many bytes follows from shapes, so one process can find
out. PyTorch's "fake" process group takes it for rank 0 of as many as we like. The collectives
then return at once and move nothing, so every value after one is wrong.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

from mgpu_tutorial.lab import span


def share_out(model: nn.Module, mesh: DeviceMesh) -> None:
    """Cut each block's matrices over `tp`, and what is left of them over `dp`.

    Each pair of products is cut by columns and then by rows, and added up once at its end.
    The first entry lets query, key and value add up their gradients together.
    """
    attention, tp = model.blocks[0].attention, mesh["tp"].size()
    heads = attention.query.out_features // attention.per_head
    if heads % tp:
        raise ValueError(f"TP {tp} cannot share {heads} heads evenly")
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


def two_steps(rank: int, world_size: int, mesh: tuple, new_stage: Callable) -> tuple:
    """Two steps of one stage on 64 tokens, as rank 0 of a `mesh` of PP · DP · TP ranks.

    Returns this rank's operations in the second step, and the parameters that it keeps. In
    the first one PyTorch also computes shapes and makes parameters equal, once.
    """
    everybody, stage = math.prod(mesh), new_stage()
    dist.init_process_group("fake", rank=0, world_size=everybody, store=FakeStore())
    share_out(stage, init_device_mesh("cpu", mesh, mesh_dim_names=("pp", "dp", "tp")))
    tokens = torch.zeros(1, 64, dtype=torch.long)
    for name in ("first", "second"):
        # CommDebugMode makes the counter see this rank's part of a matrix, not the whole
        with span(name), FlopCounterMode(display=False) as operations, CommDebugMode():
            logits = stage(tokens).flatten(0, 1)
            nn.functional.cross_entropy(logits, tokens.flatten()).backward()
    kept = sum(p.to_local().numel() for p in stage.parameters())
    return operations.get_total_flops(), kept
