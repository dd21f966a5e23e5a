"""No sample is lost, none is doubled, and bad input is refused."""

import os
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    Subset,
    get_worker_info,
    random_split,
)

from mgpu_tutorial import data_partitioning as dp
from mgpu_tutorial.lab import RankFailed, launch, ownership
from mgpu_tutorial.lab.draw.ownership import owners
from tests.thorough import MESSAGES, again
from tests.together import together

EPOCHS = [0, 1, 5]


@pytest.mark.parametrize("samples", [7, 10, 49, 1000, 60_000])
@pytest.mark.parametrize("parts", [1, 2, 3, 6, 7])
def test_equal_parts_are_disjoint_complete_and_balanced(samples, parts):
    partitioner = dp.DataPartitioner(range(samples), [1 / parts] * parts)
    found = [partitioner.indices(i) for i in range(parts)]
    assert sorted(sum(found, [])) == list(range(samples))
    assert max(map(len, found)) - min(map(len, found)) <= 1


def test_as_many_parts_as_samples_have_one_each():
    for n in range(1, 200):
        assert dp.part_ends(n, [1 / n] * n) == list(range(1, n + 1))


def test_the_classic_lengths_lose_what_we_say():
    losses = [n - sum(dp.classic_lengths(n, p)) for n, p in ((60_000, 7), (60_000, 9))]
    assert losses == [3, 6] and set(dp.classic_lengths(49, 49)) == {0}


def test_fractions_below_one_leave_the_rest_out():
    partitioner = dp.DataPartitioner(list("abcdefghij"), [0.2, 0.3])
    assert [len(partitioner.use(i)) for i in range(2)] == [2, 3]


def test_a_part_is_a_data_set():
    part = dp.DataPartitioner("abcdef", [0.5, 0.5], seed=3).use(1)
    assert [part[i] for i in range(len(part))] == ["abcdef"[i] for i in part.indices]


@pytest.mark.parametrize(
    "sizes, says",
    [
        ([], "one or more positive fractions"),
        ([0.5, 0.0], "one or more positive fractions"),
        ([0.5, -0.1], "one or more positive fractions"),
        ([float("nan")], "one or more positive fractions"),
        ([0.7, 0.4], "add up to at most 1, got 1.1"),
        ([0.999, 0.001], "part 1 would be empty: 0.001 of 10 samples"),
    ],
)
def test_sizes_that_cannot_work_are_refused(sizes, says):
    with pytest.raises(ValueError, match=says):
        dp.DataPartitioner(range(10), sizes)


@pytest.mark.parametrize("world_size", MESSAGES)
def test_ranks_agree_without_a_message(world_size):
    """The reference: one shuffle, cut by hand."""
    calls = [partial(dp.cut_alone, samples=23, seed=seed) for seed in (5, 6)]
    results, other = together(world_size, *calls, backend="none")
    order = torch.randperm(23, generator=torch.Generator().manual_seed(5)).tolist()
    lengths = {1: [23], 2: [12, 11], 3: [8, 8, 7], 4: [6, 6, 6, 5]}[world_size]
    assert results == [[order.pop(0) for _ in range(length)] for length in lengths]
    assert other != results


def test_random_split_gives_the_rest_of_its_fractions_to_the_first_parts():
    assert [len(part) for part in random_split(range(10), [1 / 3] * 3)] == [4, 3, 3]
    lengths = [dp.share(10, rank, 9) for rank in range(9)]
    assert [len(part) for part in random_split(range(10), lengths)] == [2] + [1] * 8


def test_random_split_refuses_a_sum_that_is_one_bit_above_one():
    """Nine ninths are such a sum up to Python 3.11, and are 1 from 3.12 on."""
    with pytest.raises(ValueError, match="Sum of input lengths"):
        random_split(range(10), [0.5, 0.5 + 2**-52])


def test_with_seeds_of_their_own_ranks_take_some_samples_twice_and_others_never():
    """Three shuffles, each cut by hand."""
    orders = [torch.randperm(10, generator=generator(1 + rank)).tolist() for rank in range(3)]
    parts = [orders[0][:4], orders[1][4:7], orders[2][7:]]
    assert [dp.cut_alone(rank, 3, 10, 1 + rank) for rank in range(3)] == parts
    taken = sum(parts, [])
    assert {sample for sample in taken if taken.count(sample) == 2} == {2, 6, 9}
    assert set(range(10)) - set(taken) == {3, 7, 8}


def generator(seed):
    return torch.Generator().manual_seed(seed)


def test_a_loader_of_an_empty_part_is_silent_unless_it_shuffles():
    empty = Subset(range(49), [])
    assert list(DataLoader(empty, batch_size=4)) == []
    with pytest.raises(ValueError, match="num_samples should be a positive integer"):
        DataLoader(empty, batch_size=4, shuffle=True)


def test_files_are_shared_by_name(tmp_path, monkeypatch):
    """Whatever order the folder is listed in: here backwards, and on each rank the same."""
    for i in range(5):
        Image.new("RGB", (2, 2)).save(tmp_path / f"{i}.png")
    listed = sorted(tmp_path.glob("*.png"))
    order = torch.randperm(5, generator=torch.Generator().manual_seed(1234)).tolist()
    for found in (listed, listed[::-1]):
        monkeypatch.setattr(Path, "glob", lambda self, pattern, found=found: iter(found))
        parts = [dp.take_files(rank, 2, str(tmp_path)) for rank in range(2)]
        assert parts == [[f"{i}.png" for i in cut] for cut in (order[:2], order[2:])]


@pytest.mark.parametrize("drop_last, length", [(False, 4), (True, 3)])
def test_the_sampler_pads_or_drops(drop_last, length):
    results = launch(dp.draw_epochs, 3, 10, 2, True, drop_last).results
    assert {len(epoch) for rank in results for epoch in rank} == {length}
    sampler = DistributedSampler(range(10), 3, 1, seed=7, drop_last=drop_last)
    assert results[1][0] == list(sampler)


def test_without_set_epoch_every_epoch_is_the_same():
    options = {"samples": 10, "epochs": 2, "drop_last": False}
    calls = [partial(dp.draw_epochs, set_epoch=each, **options) for each in (False, True)]
    without, with_it = together(2, *calls)
    for first, second in without:
        assert first == second
    for first, second in with_it:
        assert first != second


def take_more_steps(rank, world_size):
    for _ in range(3 + (rank == 2)):
        dist.all_reduce(torch.ones(1))


def test_a_rank_that_has_steps_left_when_the_others_end_fails():
    with pytest.raises(RankFailed, match="rank 2"):
        launch(take_more_steps, 3)


def test_shares_add_up():
    for total in (0, 1, 7, 128):
        for n in (1, 2, 3, 7):
            assert sum(dp.share(total, rank, n) for rank in range(n)) == total


def test_uneven_batch_sizes_give_uneven_numbers_of_batches():
    assert [len(batches) for batches in launch(dp.load_shares, 3, 20, 8).results] == [3, 3, 4]


def test_a_rank_with_one_batch_more_meets_the_next_epoch_of_the_others():
    first, _, last = launch(dp.compare_epochs, 3, 20, 8, 5).results
    assert first == [(0, 0.0), (0, 0.0), (0, 0.0), (1, 0.67), (1, 1.0)]
    assert last == [(0, 0.0), (0, 0.0), (0, 0.0), (0, 0.67), (1, 1.0)]


@cache
def batches_of_ranks(world_size):
    """The batches of every rank in each of three epochs, in one launch."""
    calls = [partial(dp.global_batches, samples=20, batch=8, seed=1, epoch=e) for e in EPOCHS]
    return dict(zip(EPOCHS, together(world_size, *calls), strict=True))


@pytest.mark.parametrize("epoch", EPOCHS)
@pytest.mark.parametrize("world_size", [1, 3, again(4)])
def test_global_batches_are_those_of_one_process(world_size, epoch):
    """The reference: one process that shuffles with seed plus epoch and takes eights."""
    generator = torch.Generator().manual_seed(1 + epoch)
    order = torch.randperm(20, generator=generator).tolist()
    expected = [order[:8], order[8:16], order[16:]]
    results = batches_of_ranks(world_size)[epoch]
    assert [sum(parts, []) for parts in zip(*results, strict=True)] == expected
    for parts in zip(*results, strict=True):
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_last_batch_with_fewer_samples_than_ranks_leaves_empty_pieces():
    """The first 20 // 8 pieces are those of the full batches, and have no empty one."""
    pieces = [dp.global_batches(rank, 7, 20, 8, 1, 0) for rank in range(7)]
    assert [len(parts[-1]) for parts in pieces] == [1, 1, 1, 1, 0, 0, 0]
    with pytest.raises(IndexError):
        list(DataLoader(range(20), batch_sampler=pieces[-1]))
    for parts in pieces:
        assert len(list(DataLoader(range(20), batch_sampler=parts[: 20 // 8]))) == 2


def test_a_loader_takes_the_pieces_as_its_batches():
    pieces = dp.global_batches(1, 3, 20, 8, 1, 0)
    loader = DataLoader(range(100, 120), batch_sampler=pieces)
    loaded = [[number - 100 for number in batch.tolist()] for batch in loader]
    assert loaded == pieces and list(map(len, loaded)) == [3, 3, 1]


def test_loader_seeds_differ_only_with_a_seed_of_the_ranks_own():
    alike, own = together(2, *(partial(dp.draw_noise, seed_by_rank=o) for o in (False, True)))
    first, second = alike
    assert first == second
    first, second = own
    assert first != second and len(set(first)) == 8


class Carries(dp.Noise):
    """Draws from a generator that the data set carries along."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __getitem__(self, i):
        return torch.rand(1, generator=self.generator).item()


def reseed(worker):
    get_worker_info().dataset.generator.manual_seed(torch.initial_seed())


def test_a_generator_in_the_data_set_repeats_itself_unless_it_is_seeded_again():
    seeds = torch.Generator().manual_seed(3)
    for init, repeated in ((None, True), (reseed, False)):
        loader = DataLoader(
            Carries(), batch_size=None, num_workers=2, generator=seeds, worker_init_fn=init
        )
        noise = list(loader)
        assert (noise[::2] == noise[1::2]) == repeated


def test_the_loader_of_the_recipe_gives_all_ranks_full_batches_and_new_epochs():
    results = launch(dp.load_epochs, 2, 22, 8, 3).results
    for epochs in results:
        assert [[len(batch) for batch in batches] for batches in epochs] == [[4, 4]] * 3
        assert epochs[0] != epochs[1] != epochs[2]
    for epoch in range(3):
        seen = sum((sum(epochs[epoch], []) for epochs in results), [])
        assert len(seen) == len(set(seen)) == 16


def test_the_loader_of_the_recipe_seeds_by_rank_and_keeps_its_processes():
    seeds = set()
    for rank in range(3):
        loader = dp.new_loader(range(22), rank, 3, 6, processes=2, seed=4)
        assert loader.persistent_workers and loader.num_workers == 2
        seeds.add(loader.generator.initial_seed())
    assert len(seeds) == 3


@pytest.mark.parametrize("world_size", [1, 2, again(4)])
def test_the_recipe_takes_in_each_step_what_one_process_takes(world_size):
    """The reference: full batches of eight, cut by hand from seed 1 plus the epoch."""
    results = launch(dp.load_epochs, world_size, 20, 8).results
    for epoch in range(2):
        order = torch.randperm(20, generator=generator(1 + epoch)).tolist()
        steps = zip(*(epochs[epoch] for epochs in results), strict=True)
        expected = [sorted(order[:8]), sorted(order[8:16])]
        assert [sorted(sum(parts, [])) for parts in steps] == expected


@pytest.mark.parametrize(
    "samples, batch, processes, says",
    [
        (22, 8, 2, "a batch of 8 does not divide by 3 ranks"),
        (8, 9, 2, "8 samples do not fill one batch of 9"),
        (22, 9, 0, "without loader processes all ranks would augment alike"),
    ],
)
def test_the_recipe_refuses_what_would_go_wrong_in_silence(samples, batch, processes, says):
    with pytest.raises(ValueError, match=says):
        dp.new_loader(range(samples), 0, 3, batch, processes, seed=1)
    assert len(dp.new_loader(range(9), 0, 3, 9, 1, seed=1)) == 1


def draw_in_the_rank(rank, world_size):
    torch.manual_seed(0)
    loader = DataLoader(dp.Noise(), batch_size=None, generator=generator(rank))
    return list(loader)


def test_without_loader_processes_the_generator_of_the_loader_is_no_help():
    first, second = launch(draw_in_the_rank, 2, backend="none").results
    assert first == second


class Loads(Dataset):
    """Each sample is the process that loads it."""

    version = 0

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return os.getpid(), self.version


@pytest.mark.parametrize("persistent, processes", [(True, 2), (False, 6)])
def test_only_persistent_processes_live_through_the_epochs(persistent, processes):
    """And they do not hear of a change that is made to the data set later."""
    data, found, versions = Loads(), set(), []
    loader = DataLoader(data, 4, num_workers=2, persistent_workers=persistent)
    for data.version in range(3):
        for pids, version in loader:  # noqa: B007
            found |= set(pids.tolist())
        versions.append(version[0].item())
    assert len(found) == processes
    assert versions == ([0, 0, 0] if persistent else [0, 1, 2])


@pytest.mark.parametrize("world_size", MESSAGES)
def test_the_parts_add_up_to_the_whole(world_size):
    values = torch.arange(100)
    partitioner = dp.DataPartitioner(values, [1 / world_size] * world_size)
    sums = [sum(value.item() for value in partitioner.use(i)) for i in range(world_size)]
    assert sum(sums) == 4950 and min(sums) > 0


def test_ownership_shows_who_has_what():
    assert owners([[0, 1, 1], [1, 2]], 4) == [[0], [0, 0, 1], [1], []]
    drawing = ownership({"epoch 0": [[0, 1], [1, 2]]}, 4)
    assert repr(drawing) == "epoch 0: 0 0+1 1 ·"


@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_every_epoch_is_cut_from_an_order_of_its_own(epoch):
    """The seed of an epoch's order is the run's plus the epoch; 10 samples, batches of 4."""
    generator = torch.Generator().manual_seed(5 + epoch)
    order = torch.randperm(10, generator=generator).tolist()
    expected = [[order[0:2], order[4:6], order[8:9]], [order[2:4], order[6:8], order[9:10]]]
    assert [dp.global_batches(rank, 2, 10, 4, 5, epoch) for rank in range(2)] == expected


def files_in_another_order(rank, world_size, folder):
    """The disk of rank 1 lists its files the other way round."""
    listed = dp.Path.glob

    class Shuffled(type(dp.Path())):
        def glob(self, pattern):
            return sorted(listed(self, pattern), reverse=rank == 1)

    dp.Path = Shuffled
    return dp.take_files(rank, world_size, folder)


def test_files_are_shared_alike_whatever_order_a_disk_lists_them_in(tmp_path):
    for i in range(5):
        (tmp_path / f"{i}.png").touch()
    results = launch(files_in_another_order, 2, str(tmp_path)).results
    generator = torch.Generator().manual_seed(1234)
    names = [f"{i}.png" for i in torch.randperm(5, generator=generator).tolist()]
    assert results == [names[:2], names[2:]]
