"""What the rule of a sampler must do."""

from collections.abc import Callable
from itertools import product

import torch
from torch.utils.data import DistributedSampler

from mgpu_tutorial import data_partitioning as dp
from mgpu_tutorial.lab.teach.build import Builder


def parts(rule: Callable, ranks: int, samples: int, epoch: int, drop_last: bool) -> list:
    """The samples of every rank, all asked in this process: no rank can ask another."""
    found = [rule(rank, ranks, samples, 7, epoch, drop_last) for rank in range(ranks)]
    is_empty = any(part is None for part in found)
    assert not is_empty, "nothing was returned. Is a `return` missing?"
    return [[int(sample) for sample in part] for part in found]


def loses_none(function: Callable) -> None:
    """give all three ranks equally many samples, and lose none except by drop_last"""
    for samples, drop_last in product((9, 10), (False, True)):
        each = samples // 3 if drop_last else -(-samples // 3)
        found = parts(function, 3, samples, 0, drop_last)
        seen = f"of {samples} samples with drop_last={drop_last} the parts are {found}"
        assert [len(part) for part in found] == [each] * 3, f"{seen}, expected {each} each"
        count, wanted = len(set(range(samples)) & set(sum(found, []))), min(samples, 3 * each)
        assert count == wanted, f"{seen}: {count} different ones, expected {wanted}"


def shuffles_anew(function: Callable) -> None:
    """give each epoch a new order, and the same one when asked again"""
    first, again, next_one = (parts(function, 3, 20, epoch, False) for epoch in (0, 0, 1))
    assert first == again, "asked twice, epoch 0 has two different orders"
    assert first != next_one, "epoch 1 has the order of epoch 0"


def as_pytorch(function: Callable) -> None:
    """agree with DistributedSampler, sample by sample, even with more ranks than samples"""
    cases = (3, 10, 4, False), (3, 10, 4, True), (5, 2, 1, False)
    for ranks, samples, epoch, drop_last in cases:
        for rank, found in enumerate(parts(function, ranks, samples, epoch, drop_last)):
            how = {"seed": 7, "drop_last": drop_last}
            sampler = DistributedSampler(range(samples), ranks, rank, **how)
            sampler.set_epoch(epoch)
            what = f"of {samples} samples rank {rank} of {ranks} gets {found}"
            assert found == list(sampler), f"{what}, expected {list(sampler)}"


def leaves_others_alone(function: Callable) -> None:
    """draw from a generator of its own: dropout and augmentation draw from torch's"""
    before = torch.get_rng_state()
    parts(function, 3, 10, 0, False)
    changed = not torch.equal(before, torch.get_rng_state())
    torch.set_rng_state(before)
    assert not changed, "torch's own generator is seeded or drawn from: use torch.Generator()"


def refuses(function: Callable) -> None:
    """say so when it is asked for a rank that does not exist"""
    for rank in (2, -1):
        try:
            found = function(rank, 2, 10, 7, 0, False)
        except Exception:  # in whatever words
            continue
        raise AssertionError(f"rank {rank} of 2 gets {list(found)}, expected a ValueError")


def batches(function: Callable, ranks: int, samples: int, batch: int, epoch: int) -> list:
    """What each rank gets, a list of its parts of the global batches, as whole numbers."""
    found = [function(rank, ranks, samples, batch, 7, epoch) for rank in range(ranks)]
    assert not any(mine is None for mine in found), (
        "nothing was returned. Is a `return` missing?"
    )
    return [[[int(sample) for sample in part] for part in mine] for mine in found]


def deals_global_batches(function: Callable) -> None:
    """give N ranks together, batch by batch, the samples that it gives one process"""
    for ranks, samples, batch in (3, 20, 8), (2, 12, 4), (4, 10, 3):
        given = f"{samples} samples in batches of {batch}, {ranks} ranks"
        (alone,) = batches(function, 1, samples, batch, 0)
        sizes = [batch] * (samples // batch) + [samples % batch] * (samples % batch > 0)
        found = [len(whole) for whole in alone]
        assert found == sizes, f"one process gets batches of {found}, expected {sizes}"
        every = sorted(sum(alone, []))
        assert every == list(range(samples)), f"of {samples} samples it gives {every}"
        together = batches(function, ranks, samples, batch, 0)
        for rank, mine in enumerate(together):
            what = f"{given}: rank {rank} has {len(mine)} batches, expected {len(alone)}"
            assert len(mine) == len(alone), what
        for i, (whole, *parts) in enumerate(zip(alone, *together, strict=True)):
            seen = f"{given}: batch {i} is {parts}"
            same = sorted(sum(parts, [])) == sorted(whole)
            assert same, f"{seen}, and one process has {sorted(whole)}"
            apart = max(map(len, parts)) - min(map(len, parts))
            assert apart <= 1, f"{seen}: the parts differ by {apart} samples"


def deals_anew(function: Callable) -> None:
    """give each epoch other batches, and the same ones when asked again"""
    first, again, other = (batches(function, 3, 20, 8, epoch) for epoch in (0, 0, 1))
    assert first == again, "asked twice, epoch 0 has two different orders"
    assert first != other, "epoch 1 has the batches of epoch 0"
    ordered = [sorted(sum(parts, [])) for parts in zip(*first, strict=True)]
    assert ordered[0] != list(range(8)), "the samples are not shuffled"


def leaves_the_generator_alone(function: Callable) -> None:
    """draw from a generator of its own"""
    before = torch.get_rng_state()
    batches(function, 3, 10, 4, 0)
    changed = not torch.equal(before, torch.get_rng_state())
    torch.set_rng_state(before)
    assert not changed, "torch's own generator is seeded or drawn from: use torch.Generator()"


build = Builder(
    "data_partitioning",
    {
        dp.rank_indices: [
            loses_none,
            shuffles_anew,
            as_pytorch,
            leaves_others_alone,
            refuses,
        ],
        dp.global_batches: [deals_global_batches, deals_anew, leaves_the_generator_alone],
    },
)
