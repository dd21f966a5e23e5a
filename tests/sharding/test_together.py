"""Which pieces go together: the combinations of docs/path.md, on four real ranks.

Rows of ranks share products (tensor parallel) or a sequence, columns share the batch. Every
combination has the parameters of one process after two steps.
"""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD

from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP, NaiveDDP
from mgpu_tutorial.long_sequences.others import ulysses
from mgpu_tutorial.long_sequences.ring import RingAttention, contiguous
from mgpu_tutorial.sharding.blocks import PrefetchingBlock, fully_sharded, linked
from mgpu_tutorial.sharding.stages import ShardedOptimizer, clip_shards
from mgpu_tutorial.sharding.zero import FlatParameters
from mgpu_tutorial.tensor_parallel.block import PLAN, Block, parallelize

WRAPPERS = {"NaiveDDP": NaiveDDP, "BucketedDDP": BucketedDDP}
STAGES = ("ZeRO 1", "ZeRO 2", "ZeRO 3", "ZeRO 3, ahead")
WITHOUT_BUCKETS = ("NaiveDDP", *STAGES)


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(Block(8, 4), Block(8, 4)).double()


def batch(step, samples=None, tokens=None):
    x = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(step))
    return x.double()[samples or slice(None)][:, slice(None) if tokens is None else tokens]


def prepared(piece, module, group, clip_shards_by=None):
    """The model, and its step."""
    model, optimizer, step = made(piece, module, group)
    if clip_shards_by and piece not in WRAPPERS:
        clip_shards(getattr(optimizer, "inner", optimizer), clip_shards_by, group)
    return model, step


def made(piece, module, group):
    if piece in WRAPPERS:
        model = WRAPPERS[piece](module, group=group)
        optimizer = SGD(module.parameters(), lr=0.1)
    elif piece == "ZeRO 1":
        model, optimizer = (
            module,
            ShardedOptimizer(module.parameters(), SGD, lr=0.1, group=group),
        )
    elif piece == "ZeRO 2":
        flat = FlatParameters(module, group)
        optimizer = SGD([flat.shard], lr=0.1)
        return module, optimizer, partial(flat.step, optimizer)
    else:
        if piece == "ZeRO 3, ahead":
            model = linked([PrefetchingBlock(block, group) for block in module])
        else:
            model = fully_sharded(module, list(module), group)
        optimizer = SGD(model.parameters(), lr=0.1)
    return model, optimizer, optimizer.step


def two_steps(model, step, samples=None, tokens=None, parts=1, ahead=False, clip=None):
    """Steps on this rank's share, in parts; `ahead`: all forwards before the backwards."""
    for number in range(2):
        model.zero_grad()
        whole = batch(number, samples, tokens)
        losses = (model(part).square().mean() / parts for part in whole.chunk(parts))
        for loss in list(losses) if ahead else losses:
            loss.backward()
        getattr(model, "finish_gradient_synchronization", lambda: None)()
        if clip:
            clip_grad_norm_(model.parameters(), clip)
        step()
    return model(batch(9, tokens=tokens)).detach()


def alone(**how):
    model = new_model()
    return two_steps(model, SGD(model.parameters(), lr=0.1).step, **how)


def in_rows(rank, share):
    """Two rows of two ranks, which `share` a model; the two ranks of a column, a batch."""
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = new_model()
    share(model, rows[rank // 2])
    return model, columns[rank % 2], slice(2 * (rank // 2), 2 * (rank // 2) + 2)


def share_products(model, group):
    parallelize(model, PLAN, group)


def with_products(rank, world_size, pieces, **how):
    outputs = {}
    for piece in pieces:
        module, group, samples = in_rows(rank, share_products)
        outputs[piece] = two_steps(*prepared(piece, module, group), samples, **how)
    return outputs


def like_one(found, expected):
    for of_rank in found:
        far = {piece: (output - expected).abs().max() for piece, output in of_rank.items()}
        assert max(far.values()) < 1e-12, far


@pytest.mark.parametrize(
    "how",
    [{}, {"parts": 2}, {"parts": 2, "ahead": True}],
    ids=["", "accumulated", "two forwards first, as in a pipeline"],
)
def test_what_averages_goes_together_with_tensor_parallel(ranks, how):
    pieces = WITHOUT_BUCKETS if how else (*WITHOUT_BUCKETS, "BucketedDDP")
    like_one(ranks(4, partial(with_products, pieces=pieces, **how)).results, alone())


def ring(q, k, v):
    return RingAttention.apply(q, k, v, contiguous)


def with_a_sequence(rank, world_size, attend):
    """All ranks share each sequence, and each averages the gradients over all of them."""
    outputs = {}
    for piece in (*WITHOUT_BUCKETS, "BucketedDDP"):
        model, tokens = new_model(), contiguous(6, rank, world_size)
        for block in model:
            block.attention.attend = attend
        outputs[piece] = two_steps(*prepared(piece, model, None), tokens=tokens)
    return outputs


@pytest.mark.parametrize("attend", [ring, ulysses])
def test_what_averages_goes_together_with_a_shared_sequence(ranks, attend):
    found, expected = ranks(2, with_a_sequence, attend).results, alone()
    for rank, of_rank in enumerate(found):
        like_one([of_rank], expected[:, contiguous(6, rank, 2)])


def clipped(rank, world_size, longest):
    outputs, samples = {}, slice(2 * rank, 2 * rank + 2)
    for piece in (*WITHOUT_BUCKETS, "BucketedDDP"):
        model, step = prepared(piece, new_model(), None, clip_shards_by=longest)
        clip = longest if piece in WRAPPERS else None
        outputs[piece] = two_steps(model, step, samples, clip=clip)
    return outputs


def test_whole_gradients_are_clipped_after_their_average_and_shards_by_all(ranks):
    like_one(ranks(2, clipped, 0.1).results, alone(clip=0.1))


def test_gradients_shorter_than_the_norm_stay_as_they_are(ranks):
    like_one(ranks(2, clipped, 100.0).results, alone())
