"""What the rule of a sampler must do."""

from collections.abc import Callable

from torch.utils.data import DistributedSampler

from mgpu_tutorial import data_partitioning as dp
from mgpu_tutorial.lab.teach.build import Builder

CASES = (9, False, 3), (9, True, 3), (10, False, 4), (10, True, 3)


def parts(rule: Callable, ranks: int, samples: int, epoch: int, drop_last: bool) -> list:
    """The samples of every rank, all asked in this process: no rank can ask another."""
    found = [rule(rank, ranks, samples, 7, epoch, drop_last) for rank in range(ranks)]
    is_empty = any(part is None for part in found)
    assert not is_empty, "nothing was returned. Is a `return` missing?"
    return [[int(sample) for sample in part] for part in found]


def same_lengths(function: Callable) -> None:
    """give each of three ranks 3 of 9 samples, and of 10 samples 4, or 3 with drop_last"""
    for samples, drop_last, each in CASES:
        found = parts(function, 3, samples, 0, drop_last)
        seen = f"of {samples} samples with drop_last={drop_last} the parts are {found}"
        assert [len(part) for part in found] == [each] * 3, f"{seen}, expected {each} each"


def loses_none(function: Callable) -> None:
    """lose no sample but by drop_last, and take none twice but to pad"""
    for samples, drop_last, each in CASES:
        found = parts(function, 3, samples, 0, drop_last)
        seen = f"of {samples} samples with drop_last={drop_last} the parts are {found}"
        count, wanted = len(set(range(samples)) & set(sum(found, []))), min(samples, 3 * each)
        assert count == wanted, f"{seen}: {count} different ones, expected {wanted}"


def shuffles_anew(function: Callable) -> None:
    """give each epoch a new order, and the same one when asked again"""
    first, again = (parts(function, 3, 20, 0, False) for _ in range(2))
    assert first == again, "asked twice, epoch 0 has two different orders"
    assert first != parts(function, 3, 20, 1, False), "epoch 1 has the order of epoch 0"


def as_pytorch(function: Callable) -> None:
    """agree with DistributedSampler, sample by sample, also on more ranks than samples"""
    for ranks, samples, epoch, drop_last in (
        (3, 10, 0, False),
        (3, 10, 4, True),
        (4, 21, 1, False),
        (5, 2, 0, False),
    ):
        found = parts(function, ranks, samples, epoch, drop_last)
        for rank in range(ranks):
            how = {"seed": 7, "drop_last": drop_last}
            sampler = DistributedSampler(range(samples), ranks, rank, **how)
            sampler.set_epoch(epoch)
            what = f"of {samples} samples rank {rank} of {ranks} gets {found[rank]}"
            assert found[rank] == list(sampler), f"{what}, expected {list(sampler)}"


build = Builder(
    "data_partitioning",
    {dp.rank_indices: [same_lengths, loses_none, shuffles_anew, as_pytorch]},
)
