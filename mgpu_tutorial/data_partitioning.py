"""Data partitioning: which rank sees which sample, in which epoch, in which batch.

No rank asks another: all of them draw the same permutation from the same seed, and each
takes its own part of it.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Partition(Dataset):
    """The samples `index` of `data`, in this order; `data` itself is not copied."""

    def __init__(self, data: Sequence, index: list[int]) -> None:
        self.data = data
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int):
        return self.data[self.index[i]]


class DataPartitioner:
    """Shuffle once with `seed`, then cut into parts of the given `sizes` (fractions).

    Every sample is in exactly one part when the fractions add up to 1. Raises ValueError
    for a fraction that is not positive, for a sum above 1 and for a part without samples.
    """

    def __init__(self, data: Sequence, sizes: Sequence[float], seed: int = 1234) -> None:
        self.data = data
        ends = part_ends(len(data), sizes)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(data), generator=generator, device="cpu").tolist()
        self.parts = [order[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    def indices(self, i: int) -> list[int]:
        """The samples of part `i`, for data that is a list of files or of names."""
        return self.parts[i]

    def use(self, i: int) -> Partition:
        """Part `i` as a data set of its own."""
        return Partition(self.data, self.parts[i])


def part_ends(samples: int, sizes: Sequence[float]) -> list[int]:
    """Where each part ends. Rounding the running sum, not each part, loses nothing."""
    if not sizes or any(not size > 0 for size in sizes):
        raise ValueError(f"sizes must be one or more positive fractions, got {list(sizes)}")
    if sum(sizes) > 1 + 1e-9:
        raise ValueError(f"sizes must add up to at most 1, got {sum(sizes):g}: {list(sizes)}")
    ends = [round(samples * sum(sizes[: i + 1])) for i in range(len(sizes))]
    for part, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if begin == end:
            raise ValueError(
                f"part {part} would be empty: {sizes[part]:g} of {samples} samples. "
                "Give it a larger fraction, or use fewer parts."
            )
    return ends


def classic_lengths(samples: int, parts: int) -> list[int]:
    """The lengths that int(fraction * samples) gives: the usual way, and it loses samples."""
    return [int(1.0 / parts * samples) for _ in range(parts)]


def my_part(rank: int, world_size: int, samples: int, seed: int) -> list[int]:
    """Each rank cuts the same data alone, and returns the samples of its own part."""
    partitioner = DataPartitioner(range(samples), [1 / world_size] * world_size, seed)
    return list(partitioner.use(rank))


def my_files(rank: int, world_size: int, folder: str) -> list[str]:
    """Each rank takes its share of the image files of a folder, by their sorted names."""
    files = sorted(Path(folder).glob("*.png"))  # sorted: else the order may differ by rank
    partitioner = DataPartitioner(files, [1 / world_size] * world_size)
    return [files[i].name for i in partitioner.indices(rank)]


def sampled(
    rank: int, world_size: int, samples: int, epochs: int, set_epoch: bool, drop_last: bool
) -> list[list[int]]:
    """The samples that a DistributedSampler gives this rank, one list an epoch."""
    sampler = DistributedSampler(range(samples), seed=7, drop_last=drop_last)
    orders = []
    for epoch in range(epochs):
        if set_epoch:
            sampler.set_epoch(epoch)
        orders.append(list(sampler))
    return orders


def share(total: int, rank: int, world_size: int) -> int:
    """This rank's share of `total`; the first ranks take one more if it does not divide."""
    return total // world_size + (rank < total % world_size)


def loaded(rank: int, world_size: int, samples: int, batch: int) -> list[list[int]]:
    """The batches that each rank's loader delivers, for a global batch of `batch`."""
    data = list(range(samples))
    sampler = DistributedSampler(data, shuffle=False)
    mine = share(batch, rank, world_size)
    loader = DataLoader(data, batch_size=mine, sampler=sampler)  # which sets the order
    return [samples.tolist() for samples in loader]


def global_batches(
    rank: int, world_size: int, samples: int, batch: int, seed: int, epoch: int
) -> list[list[int]]:
    """Cut every global batch between the ranks: all have the same number of batches."""
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(samples, generator=generator, device="cpu")
    return [whole.tensor_split(world_size)[rank].tolist() for whole in order.split(batch)]


class Noise(Dataset):
    """Eight samples that are random numbers, like an augmentation drawn while loading."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> float:
        return round(torch.rand(1).item(), 4)


def augmented(rank: int, world_size: int, own_seed: bool) -> list[float]:
    """Random numbers drawn in two loader processes; with `own_seed` they differ by rank."""
    torch.manual_seed(0)  # the weights: alike on all ranks
    generator = torch.Generator().manual_seed(rank) if own_seed else None
    loader = DataLoader(Noise(), batch_size=None, num_workers=2, generator=generator)
    return list(loader)


def copy_times(rank: int, world_size: int, megabytes: int = 256) -> dict | None:
    """On a GPU: milliseconds until a copy to it returns, and until the copy is done."""
    if torch.get_default_device().type != "cuda":
        print("no GPU: a batch is where it is needed already")
        return None
    times = {}
    for pinned in (False, True):
        batch = torch.ones(megabytes << 18, device="cpu", pin_memory=pinned)
        for non_blocking in (False, True):
            batch.to("cuda", non_blocking=non_blocking)  # the first copy also sets up
            torch.cuda.synchronize()
            begin = time.perf_counter()
            copied = batch.to("cuda", non_blocking=non_blocking)
            returned = time.perf_counter()
            torch.cuda.synchronize()
            done = time.perf_counter()
            assert copied.sum() == batch.numel()
            times[pinned, non_blocking] = (1e3 * (returned - begin), 1e3 * (done - begin))
            print(f"{pinned=} {non_blocking=}: {times[pinned, non_blocking]} ms")
    return times


def part_sum(rank: int, world_size: int, values: torch.Tensor) -> float:
    """The sum of this rank's part of `values`."""
    partitioner = DataPartitioner(values, [1 / world_size] * world_size)
    return sum(value.item() for value in partitioner.use(rank))
