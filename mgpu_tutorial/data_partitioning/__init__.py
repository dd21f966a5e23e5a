"""Data partitioning: which rank sees which sample, in which epoch, in which batch."""

import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice, pairwise

import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    get_worker_info,
    random_split,
)


def check_rank(rank: int, world_size: int) -> None:
    """Refuse a rank that does not exist: its part would be empty, or that of another rank."""
    if not 0 <= rank < world_size:
        raise ValueError(f"there is no rank {rank} of {world_size}")


def share(total: int, rank: int, world_size: int) -> int:
    """This rank's share of `total`; the first ranks take one more if it does not divide."""
    check_rank(rank, world_size)
    return total // world_size + (rank < total % world_size)


def cut_alone(rank: int, world_size: int, samples: int, seed: int) -> list[int]:
    """Each rank shuffles and cuts the data alone; returns the samples of its own part."""
    check_rank(rank, world_size)
    lengths = [share(samples, r, world_size) for r in range(world_size)]
    generator = torch.Generator().manual_seed(seed)
    parts = random_split(range(samples), lengths, generator)
    return list(parts[rank])


def part_ends(samples: int, sizes: Sequence[float]) -> list[int]:
    """Where each part ends. Rounding the running sum, not each part, loses nothing."""
    if not all(size > 0 for size in sizes) or sum(sizes) > 1 + 1e-9:
        what = "sizes must be positive fractions that add up to at most 1"
        raise ValueError(f"{what}, got {sizes}")
    return [round(samples * sum(sizes[: part + 1])) for part in range(len(sizes))]


class DataPartitioner:
    """Shuffle once with `seed`, then cut into parts of the given `sizes` (fractions)."""

    def __init__(self, data: Dataset, sizes: Sequence[float], seed: int = 1234) -> None:
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(data), generator=generator, device="cpu").tolist()
        ends = [0, *part_ends(len(data), sizes)]
        self.parts = [Subset(data, order[a:b]) for a, b in pairwise(ends)]
        if empty := [i for i, part in enumerate(self.parts) if len(part) == 0]:
            what = f"parts {empty} of {len(data)} samples would be empty with {sizes=}"
            raise ValueError(f"{what}: give them larger fractions, or use fewer parts")

    def use(self, i: int) -> Subset:
        """Part `i` as a data set of its own; its `indices` are the numbers of the samples."""
        return self.parts[i]


def rank_indices(
    rank: int, world_size: int, samples: int, seed: int, epoch: int, drop_last: bool
) -> list[int]:
    """The sample numbers of this rank in one epoch, in the order of DistributedSampler.

    Only where all ranks give the same seed and epoch are they each sample's only rank.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"there is no rank {rank} of {world_size}")
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(samples, generator=generator, device="cpu").tolist()
    if drop_last:
        order = order[: samples - samples % world_size]
    else:
        missing = -samples % world_size
        order += (order * world_size)[:missing]
    return order[rank::world_size]


def global_batches(
    rank: int, world_size: int, samples: int, batch: int, seed: int, epoch: int
) -> list[list[int]]:
    """Cut every global batch between the ranks: all have the same number of batches.

    All ranks give the same `samples`, `batch`, `seed` and `epoch`: they cut the same order.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"there is no rank {rank} of {world_size}")
    generator = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(samples, generator=generator, device="cpu")
    wholes = order.split(batch)
    return [whole.tensor_split(world_size)[rank].tolist() for whole in wholes]


def new_loader(
    data: Dataset, rank: int, world_size: int, batch: int, seed: int
) -> DataLoader:
    """This rank's loader for training; `batch` samples are taken by all ranks together.

    Call `loader.sampler.set_epoch` before each epoch: without it all have the same order.
    """
    if batch % world_size:
        raise ValueError(f"a batch of {batch} does not divide by {world_size} ranks")
    if len(data) < batch:
        raise ValueError(f"{len(data)} samples do not fill one batch of {batch}")
    return DataLoader(
        data,
        batch_size=batch // world_size,
        sampler=DistributedSampler(data, world_size, rank, seed=seed, drop_last=True),
        drop_last=True,
        num_workers=2,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(seed + rank),
        pin_memory=torch.cuda.is_available(),
    )


class StreamShare(IterableDataset):
    """This rank's part of each global batch; the first pass leaves out `done` batches.

    The stream comes in the same order in each pass and process. It yields finished batches,
    so a DataLoader takes batch_size=None: with a number it would join several steps.
    Samples at the end that do not fill a batch are left out.
    """

    def __init__(
        self, stream: Iterable, rank: int, world_size: int, batch: int, done: int = 0
    ) -> None:
        check_rank(rank, world_size)
        refuse_bad_stream(stream, world_size, batch)
        self.stream, self.rank, self.world_size = stream, rank, world_size
        self.batch, self.done = batch, done
        # by loader process: has it skipped what is done? All processes see this tensor.
        self.skipped = torch.zeros(256, dtype=torch.bool, device="cpu").share_memory_()

    def __iter__(self) -> Iterator[list]:
        info = get_worker_info()  # of the loader process; None in the rank itself
        process, processes = (info.id, info.num_workers) if info else (0, 1)
        done = 0 if self.skipped[process] else self.done
        self.skipped[process] = True
        samples = islice(self.stream, done * self.batch, None)
        for step in count():
            whole = list(islice(samples, self.batch))
            if len(whole) < self.batch:
                return
            if step % processes == process:
                yield whole[self.rank :: self.world_size]


def refuse_bad_stream(stream: Iterable, world_size: int, batch: int) -> None:
    """A stream can be read again, and of each batch every rank has a sample."""
    if iter(stream) is stream:
        raise TypeError(
            "the stream is an iterator, which is used up after one pass: give an object "
            "whose __iter__ begins anew"
        )
    if batch < world_size:
        raise ValueError(f"a batch of {batch} leaves some of {world_size} ranks without any")


def time_copies(rank: int, world_size: int, megabytes: int = 256) -> dict | None:
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
