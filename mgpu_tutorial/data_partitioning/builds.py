"""What the rule of a sampler must do."""

from collections.abc import Callable

from torch.utils.data import DistributedSampler

from mgpu_tutorial import data_partitioning as dp
from mgpu_tutorial.lab.teach.build import Builder, launch


def parts(rule: Callable, ranks: int, samples: int, epoch: int, drop_last: bool) -> list:
    """The samples of every rank, all asked in this process."""
    found = [rule(rank, ranks, samples, 7, epoch, drop_last) for rank in range(ranks)]
    is_empty = any(part is None for part in found)
    assert not is_empty, "nothing was returned. Is a `return` missing?"
    return [[int(sample) for sample in part] for part in found]


def same_lengths(found: list[list], length: int, how: str) -> None:
    """Every rank has so many samples."""
    for rank, part in enumerate(found):
        what = f"of {how}, rank {rank} of {len(found)} gets {len(part)}"
        assert len(part) == length, f"{what}, expected {length}"


def deals_out(function: Callable) -> None:
    """give each of nine samples to one of three ranks, three to each"""
    for drop_last in (False, True):
        found = parts(function, 3, 9, 0, drop_last)
        for sample in range(9):
            count = sum(found, []).count(sample)
            how = f"with drop_last={drop_last} the parts are {found}"
            assert count == 1, f"{how}: sample {sample} is in them {count} times, not once"
        same_lengths(found, 3, "nine samples")


def pads(function: Callable) -> None:
    """give ten samples to three ranks, four to each, and lose none"""
    found = parts(function, 3, 10, 0, False)
    same_lengths(found, 4, "ten samples")
    dealt = set(sum(found, []))
    missing, strange = sorted(set(range(10)) - dealt), sorted(dealt - set(range(10)))
    assert not missing, f"no rank has sample {missing[0]}"
    assert not strange, f"a rank has sample {strange[0]}, and there are only 0 to 9"


def drops(function: Callable) -> None:
    """leave out one of ten samples with drop_last, and repeat none"""
    found = parts(function, 3, 10, 0, True)
    same_lengths(found, 3, "ten samples with drop_last")
    assert len(set(sum(found, []))) == 9, f"a sample is there twice: {found}"


def shuffles_anew(function: Callable) -> None:
    """give each epoch a new order, and the same one when asked again"""
    first, again = (parts(function, 3, 20, 0, False) for _ in range(2))
    assert first == again, "asked twice, epoch 0 has two different orders"
    assert first != parts(function, 3, 20, 1, False), "epoch 1 has the order of epoch 0"


def no_message(function: Callable) -> None:
    """come to the same answer in three processes without a message"""
    found = launch(function, 3, 10, 7, 2, False, backend="none").results
    found = [list(map(int, part)) for part in found]
    here = parts(function, 3, 10, 2, False)
    assert found == here, f"three processes get {found}, this one alone {here}"


def as_pytorch(function: Callable) -> None:
    """agree with DistributedSampler, sample by sample, also on more ranks than samples"""
    for samples, ranks, epoch, drop_last in (
        (10, 3, 0, False),
        (10, 3, 4, True),
        (21, 4, 1, False),
        (2, 5, 0, False),
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
    {dp.rank_indices: [deals_out, pads, drops, shuffles_anew, no_message, as_pytorch]},
)
