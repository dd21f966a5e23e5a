"""The order of the data, and a run that loses ranks."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.survival import order


@given(st.integers(0, 20), st.integers(1, 9), st.integers(1, 20), st.integers(0, 40))
def test_the_ranks_share_the_batch_of_one(step, world_size, batch, more):
    samples = batch + more
    one = order.samples_of(step, 0, 1, batch, samples).tolist()
    shares = [
        order.samples_of(step, r, world_size, batch, samples) for r in range(world_size)
    ]
    assert torch.cat(shares).tolist() == one and len(set(one)) == batch
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_five_ranks_with_unequal_shares_take_the_steps_of_one(ranks):
    start, steps = torch.zeros(4, dtype=torch.float64), range(4)
    (one,) = ranks(1, order.train_on, start, steps).results
    for weight in ranks(5, order.train_on, start, steps).results:
        torch.testing.assert_close(weight, one, rtol=0, atol=1e-12)


@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 4), st.integers(0, 3))
def test_an_epoch_has_each_sample_at_most_once(batch, batches, rest, epoch):
    samples = batch * batches + rest % batch
    steps = range(epoch * batches, (epoch + 1) * batches)
    seen = Counter(
        i for s in steps for i in order.samples_of(s, 0, 1, batch, samples).tolist()
    )
    assert set(seen.values()) == {1} and len(seen) == batch * batches


def save_without_a_cpu(rank, world_size, folder):
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("cuda:gloo", store=store, rank=rank, world_size=world_size)
    dcp.async_save({"weight": torch.ones(2)}, checkpoint_id=folder)


@pytest.mark.slow
def test_saving_in_the_background_needs_a_backend_for_the_cpu(ranks, tmp_path):
    with pytest.raises(RankFailed, match="A CPU backend must be enabled"):
        ranks(2, save_without_a_cpu, str(tmp_path), backend="none")
