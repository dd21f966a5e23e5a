"""What the compiler makes of a model around which DDP stands, and of one that is sharded."""

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from mgpu_tutorial.fully_shard.units import loss_of, shard_blocks, share_of_batch
from mgpu_tutorial.shared.models import SmallTransformer


def with_ddp(model, backend, **settings):
    return torch.compile(DistributedDataParallel(model, **settings), backend=backend)


def in_small_buckets(model, backend):
    return with_ddp(model, backend, bucket_cap_mb=1)


def each_block(model, backend):
    for block in model.blocks:
        block.compile(backend=backend)
    shard_blocks(model)
    return model


def graphs(rank, world_size, way):
    """Two steps of a model of 9.6 MB; how many operations each graph of the compiler has."""
    lengths = []

    def count(graph, inputs):
        lengths.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph.forward

    model = way(SmallTransformer(vocabulary=64, width=256, heads=4, depth=3), count)
    for step in range(2):
        loss_of(model, share_of_batch(0, 1, step)).backward()
    return lengths


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "expected"), [(with_ddp, 2), (in_small_buckets, 10), (each_block, 1)]
)
def test_ddp_is_cut_at_its_buckets_and_one_graph_serves_all_blocks(ranks, way, expected):
    assert len(ranks(1, graphs, way).results[0]) == expected
