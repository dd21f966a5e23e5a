"""No sample is lost, and none is doubled."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from mgpu_tutorial import data_partitioning as dp


def shuffled(samples, seed):
    """The reference: what one process draws."""
    return torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tolist()


def cut(order, lengths):
    """The order in parts of these lengths, one after the other."""
    order = list(order)
    return [[order.pop(0) for _ in range(length)] for length in lengths]


def even(total, parts):
    """Lengths that differ by one at most, the longer ones first."""
    return [len(range(part, total, parts)) for part in range(parts)]


world_sizes, seeds = st.integers(1, 9), st.integers(0, 99)


@given(st.integers(9, 60), world_sizes, seeds)
def test_each_rank_cuts_the_same_order_and_keeps_its_own_part(samples, world_size, seed):
    parts = [dp.cut_alone(rank, world_size, samples, seed) for rank in range(world_size)]
    assert parts == cut(shuffled(samples, seed), even(samples, world_size))


@given(st.integers(0, 60_000), st.lists(st.integers(1, 9), min_size=1, max_size=200))
def test_each_part_ends_at_the_sample_nearest_to_where_its_fractions_do(samples, weights):
    ends = dp.part_ends(samples, [weight / sum(weights) for weight in weights])
    exact = [samples * part / sum(weights) for part in accumulate(weights)]
    assert all(abs(end - at) < 0.5001 for end, at in zip(ends, exact, strict=True))
    assert ends[-1] == samples


@given(st.permutations([1, 2, 3, 4]), seeds)
def test_a_partitioner_cuts_one_shuffled_order(weights, seed):
    data = [f"sample {i}" for i in range(20)]
    partitioner = dp.DataPartitioner(data, [weight / 10 for weight in weights], seed)
    for i, part in enumerate(cut(shuffled(20, seed), [2 * weight for weight in weights])):
        assert list(partitioner.use(i)) == [data[j] for j in part]


@given(st.integers(1, 60), st.integers(1, 20), world_sizes, seeds, st.integers(0, 9))
def test_global_batches_are_those_of_one_process(samples, batch, world_size, seed, epoch):
    order = shuffled(samples, seed + epoch)
    batches = [order[i : i + batch] for i in range(0, samples, batch)]
    expected = [cut(whole, even(len(whole), world_size)) for whole in batches]
    for rank in range(world_size):
        found = dp.global_batches(rank, world_size, samples, batch, seed, epoch)
        assert found == [parts[rank] for parts in expected]


@given(st.integers(0, 60), world_sizes, st.integers(1, 5), seeds, st.integers(0, 9))
def test_the_recipe_deals_out_full_batches_of_one_order(more, world_size, each, seed, epoch):
    batch = each * world_size
    samples = batch + more
    for rank in range(world_size):
        mine = dp.rank_indices(rank, world_size, samples, seed, epoch, drop_last=True)
        loader = dp.new_loader(range(samples), rank, world_size, batch, seed)
        loader.sampler.set_epoch(epoch)
        full = [mine[i : i + each] for i in range(0, len(mine) - each + 1, each)]
        assert list(loader.batch_sampler) == full and len(loader) == samples // batch
        assert loader.generator.initial_seed() == seed + rank


def test_the_recipe_refuses_a_batch_that_does_not_divide():
    with pytest.raises(ValueError, match="a batch of 8 does not divide by 3 ranks"):
        dp.new_loader(range(22), 0, 3, 8, seed=1)


def load_stream(rank, world_size, samples, batch, processes, done):
    share = dp.StreamShare(range(samples), rank, world_size, batch, done)
    return list(DataLoader(share, batch_size=None, num_workers=processes))


@pytest.mark.parametrize("processes", [0, 3])
@pytest.mark.parametrize("world_size", [1, 3])
def test_a_stream_is_taken_once_and_goes_on_where_it_stopped(ranks, world_size, processes):
    """20 samples in batches of 6: three steps, and two samples that fill none."""
    for done in (0, 1, 3):
        results = ranks(world_size, load_stream, 20, 6, processes, done).results
        steps = [sorted(sum(parts, [])) for parts in zip(*results, strict=True)]
        assert steps == [list(range(6 * i, 6 * i + 6)) for i in range(done, 3)]
        assert all(len(batch) == 6 // world_size for part in results for batch in part)


def epochs_after_a_restart(rank, world_size, processes, kept):
    share = dp.StreamShare(range(16), rank, world_size, batch=4, done=2)
    options = {"num_workers": processes, "persistent_workers": kept}
    loader = DataLoader(share, batch_size=None, **options)
    return [[number for batch in loader for number in batch] for _ in range(3)]


@pytest.mark.parametrize("processes, kept", [(0, False), (2, False), (2, True)])
def test_only_the_epoch_that_was_begun_is_short(ranks, processes, kept):
    for rank, epochs in enumerate(ranks(2, epochs_after_a_restart, processes, kept).results):
        whole = list(range(rank, 16, 2))
        assert epochs == [whole[4:], whole, whole]


class Counted(Dataset):
    """Its samples are the epoch that it was told."""

    epoch = 0

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return self.epoch


def tell_the_data_set(rank, world_size):
    data, heard = Counted(), []
    loader = DataLoader(data, num_workers=1, persistent_workers=True)
    for data.epoch in (1, 2):
        heard.append([epoch.item() for epoch in loader])
    return heard


def test_a_loader_process_that_is_kept_does_not_hear_a_new_epoch(ranks):
    """It has a copy from before, as the notebook says under `persistent_workers`."""
    assert ranks(1, tell_the_data_set).results == [[[1, 1], [1, 1]]]
