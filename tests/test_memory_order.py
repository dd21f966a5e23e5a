"""The course's own collectives read what a tensor says, not how it lies in memory.

On two ranks the same numbers lie in another order in memory: gloo would add them up, or
hand them over, as they lie.
"""

import pytest
import torch

from mgpu_tutorial.experts import parallel
from mgpu_tutorial.long_sequences import others, ring
from mgpu_tutorial.tensor_parallel import block, layers
from mgpu_tutorial.tensor_parallel_in_practice import sequence

X = torch.arange(16.0).view(1, 4, 4)


def rows(x):
    return parallel.Exchange.apply(x[0], [2, 2], [2, 2])


def parts(x):
    return others.Exchange.apply(x, 1, 2)


def whole(x):
    return block.whole_of(x[0], layers.shard(torch.zeros(8, 4), 0))


OWN = {
    "sum_of": layers.sum_of,
    "g": layers.SumOverRanks.apply,
    "f": layers.CopyToRanks.apply,
    "gathered": sequence.gathered,
    "scattered_sum": sequence.scattered_sum,
    "GatherSequence": sequence.GatherSequence.apply,
    "ScatterSequence": sequence.ScatterSequence.apply,
    "Shift": ring.Shift.apply,
    "Exchange of rows": rows,
    "Exchange of parts": parts,
    "whole_of": whole,
}


PLAIN = "sum_of", "gathered", "scattered_sum"  # of which autograd knows nothing


def call(rank, world_size, name, turned):
    """The result, and the gradient of X where it has one that is turned over as well."""
    x = X.clone().requires_grad_()
    lies = x.mT.contiguous().mT if rank in turned else x.clone()
    given = lies.detach() if name in PLAIN else lies
    found = OWN[name](given)
    if found.requires_grad:
        weights = torch.arange(found.numel(), dtype=torch.float32).view(found.shape)
        weights = weights.mT.contiguous().mT if rank in turned else weights
        found.backward(weights)
    return found.detach(), x.grad


@pytest.mark.parametrize("name", OWN)
def test_a_tensor_may_lie_in_another_order_on_each_rank(ranks, name):
    one, turned = (ranks(2, call, name, where).results for where in ([], [1]))
    torch.testing.assert_close(turned, one, rtol=0, atol=0)
