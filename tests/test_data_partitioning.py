"""No sample is lost, none is doubled, and bad input is refused."""

import pytest
import torch
from PIL import Image
from torch.utils.data import DistributedSampler

from mgpu_tutorial import data_partitioning as dp
from mgpu_tutorial.lab import launch, ownership
from mgpu_tutorial.lab.draw.ownership import owners


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


def test_a_partition_is_a_data_set():
    partition = dp.DataPartitioner("abcdef", [0.5, 0.5], seed=3).use(1)
    assert [partition[i] for i in range(len(partition))] == [
        "abcdef"[i] for i in partition.index
    ]


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


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ranks_agree_without_a_message(world_size):
    results = launch(dp.my_part, world_size, 23, 5, backend="none").results
    alone = dp.DataPartitioner(range(23), [1 / world_size] * world_size, 5)
    assert results == [alone.indices(i) for i in range(world_size)]
    other = launch(dp.my_part, world_size, 23, 6, backend="none").results
    assert other != results


def test_files_are_shared_by_name(tmp_path):
    for i in range(5):
        Image.new("RGB", (2, 2)).save(tmp_path / f"{i}.png")
    results = launch(dp.my_files, 2, str(tmp_path)).results
    assert sorted(results[0] + results[1]) == [f"{i}.png" for i in range(5)]


@pytest.mark.parametrize("drop_last, length", [(False, 4), (True, 3)])
def test_the_sampler_pads_or_drops(drop_last, length):
    results = launch(dp.sampled, 3, 10, 2, True, drop_last).results
    assert {len(epoch) for rank in results for epoch in rank} == {length}
    sampler = DistributedSampler(range(10), 3, 1, seed=7, drop_last=drop_last)
    assert results[1][0] == list(sampler)


def test_without_set_epoch_every_epoch_is_the_same():
    for first, second in launch(dp.sampled, 2, 10, 2, False, False).results:
        assert first == second
    for first, second in launch(dp.sampled, 2, 10, 2, True, False).results:
        assert first != second


def test_shares_add_up():
    for total in (0, 1, 7, 128):
        for n in (1, 2, 3, 7):
            assert sum(dp.share(total, rank, n) for rank in range(n)) == total


def test_uneven_batch_sizes_give_uneven_numbers_of_batches():
    assert [len(batches) for batches in launch(dp.loaded, 3, 20, 8).results] == [3, 3, 4]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_global_batches_are_those_of_one_process(world_size):
    results = launch(dp.global_batches, world_size, 20, 8, 1, 0).results
    (alone,) = launch(dp.global_batches, 1, 20, 8, 1, 0).results
    assert [sum(parts, []) for parts in zip(*results, strict=True)] == alone


def test_loader_seeds_differ_only_with_a_seed_of_ones_own():
    first, second = launch(dp.augmented, 2, False).results
    assert first == second
    first, second = launch(dp.augmented, 2, True).results
    assert first != second


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_parts_add_up_to_the_whole(world_size):
    values = torch.arange(100.0)
    assert sum(launch(dp.part_sum, world_size, values).results) == values.sum()


def test_ownership_shows_who_has_what():
    assert owners([[0, 1, 1], [1, 2]], 4) == [[0], [0, 0, 1], [1], []]
    drawing = ownership({"epoch 0": [[0, 1], [1, 2]]}, 4)
    assert repr(drawing) == "epoch 0: 0 0+1 1 ·"
