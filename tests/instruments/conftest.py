"""`prove`, in whose tests the runs of one process are shared."""

import pytest
import torch

from mgpu_tutorial.instruments.prove import watch_worker
from mgpu_tutorial.instruments.prove.proof import compare


@pytest.fixture
def proved(ranks):
    """`prove(worker, world_size, …)`; one process gets `one`, and the ranks get `several`."""

    def prove(world_size, worker, *args, dtype=torch.float64, one=None, several=None, **both):
        given = worker, args, both | (one or {}), dtype
        first, moved = (
            ranks(1, watch_worker, *given, move, device="cpu").results[0]
            for move in (False, True)
        )
        given = worker, args, both | (several or {}), dtype, False
        found = ranks(world_size, watch_worker, *given, device="cpu", timeout=60)
        return compare(first, moved, found.results)

    return prove
