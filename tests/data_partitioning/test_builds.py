"""The rule of a sampler, right in other words, and wrong as people write it."""

from mgpu_tutorial.data_partitioning.builds import build
from tests.builds import right_and_wrong

RULE = """
import math
import random
import torch
from torch.utils.data import DistributedSampler

def rank_indices(rank, world_size, samples, seed, epoch, drop_last):
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(samples, generator=generator).tolist()
    if drop_last:
        order = order[: samples - samples % world_size]
    else:
        order += (order * world_size)[: -samples % world_size]
    return order[rank::world_size]
"""
BODY = RULE.partition("drop_last):\n")[2]
PADDED = "(order * world_size)[: -samples % world_size]"
LOOP = """\
    generator = torch.Generator()
    generator.manual_seed(epoch + seed)
    order = [int(i) for i in torch.randperm(samples, generator=generator)]
    each = samples // world_size if drop_last else math.ceil(samples / world_size)
    return [order[(rank + i * world_size) % samples] for i in range(each)]
"""
PYTORCH = """\
    sampler = DistributedSampler(
        range(samples), world_size, rank, seed=seed, drop_last=drop_last
    )
    sampler.set_epoch(epoch)
    return list(sampler)
"""
TENSORS = """\
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed + epoch))
    each = (samples if drop_last else samples + world_size - 1) // world_size
    places = torch.arange(each * world_size) % samples
    return order[places].view(each, world_size)[:, rank]
"""


def changed(old, new):
    assert old in RULE
    return RULE.replace(old, new)


WRONG = [
    (changed("seed + epoch", "seed"), "epoch 1 has the order of epoch 0"),
    (changed("seed + epoch", "seed + epoch + rank"), "the parts are ["),
    (changed(", generator=generator", ""), "the parts are ["),
    (changed("return ", ""), "nothing was returned"),
    (changed("rank::world_size", "rank:"), "the parts are ["),
    (changed(f"order += {PADDED}", "pass"), "rank 1 of 3 gets 3, expected 4"),
    (changed(PADDED, "order[: world_size - samples % world_size]"), "the parts are ["),
    (changed(PADDED, "order[: -samples % world_size]"), "of 2 samples rank 4 of 5"),
    (changed(PADDED, "[0] * (-samples % world_size)"), "of 10 samples rank"),
    (changed("order[: samples - samples % world_size]", "order[:-1]"), "the parts are ["),
    (changed("if drop_last", "if not drop_last"), "rank 0 of 3 gets 3, expected 4"),
    (
        changed("order[rank::world_size]", "torch.tensor(order).chunk(world_size)[rank]"),
        "of 10 samples rank 0 of 3 gets",
    ),
]


test_right, test_wrong = right_and_wrong(
    build, (RULE.replace(BODY, body) for body in (BODY, LOOP, PYTORCH, TENSORS)), WRONG
)
