"""The order of the data, a run that loses ranks, and a checkpoint of parts."""

import os
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.survival import order, shards


@given(st.integers(0, 20), st.integers(1, 9), st.integers(1, 20), st.integers(0, 40))
def test_the_ranks_share_the_batch_of_one(step, world_size, batch, more):
    samples = batch + more
    one = order.samples_of(step, 0, 1, batch, samples).tolist()
    shares = [
        order.samples_of(step, r, world_size, batch, samples) for r in range(world_size)
    ]
    assert torch.cat(shares).tolist() == one and len(set(one)) == batch
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@given(st.integers(1, 8), st.integers(1, 6), st.integers(0, 4), st.integers(0, 3))
def test_an_epoch_has_each_sample_at_most_once(batch, batches, rest, epoch):
    samples = batch * batches + rest % batch
    steps = range(epoch * batches, (epoch + 1) * batches)
    seen = Counter(
        i for s in steps for i in order.samples_of(s, 0, 1, batch, samples).tolist()
    )
    assert set(seen.values()) == {1} and len(seen) == batch * batches


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_any_number_of_ranks_goes_on_where_four_stopped(ranks, world_size):
    lot = torch.Generator().manual_seed(1)
    inputs = torch.randn(50, 4, generator=lot, dtype=torch.float64)
    targets = (inputs**2).sum(1)
    weight = torch.zeros(4, dtype=torch.float64)
    for step in range(20):
        epoch, place = step // 4, step % 4
        lot = torch.Generator().manual_seed(epoch)
        mine = torch.randperm(50, generator=lot)[12 * place : 12 * place + 12]
        errors = inputs[mine] @ weight - targets[mine]
        weight -= 0.05 * 2 / 12 * inputs[mine].T @ errors
    start = torch.zeros(4, dtype=torch.float64)
    half = ranks(4, order.train_on, start, range(10)).results[0]
    for end in ranks(world_size, order.train_on, half, range(10, 20)).results:
        torch.testing.assert_close(end, weight, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_what_the_next_step_changes_is_not_in_the_checkpoint(ranks, tmp_path):
    assert ranks(2, shards.save_while_training, str(tmp_path), timeout=60).results == [1, 1]
    assert sorted(os.listdir(tmp_path)) == [".metadata", "__0_0.distcp", "__1_0.distcp"]


def save_without_a_cpu(rank, world_size, folder):
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("cuda:gloo", store=store, rank=rank, world_size=world_size)
    dcp.async_save({"weight": torch.ones(2)}, checkpoint_id=folder)


@pytest.mark.slow
def test_saving_in_the_background_needs_a_backend_for_the_cpu(ranks, tmp_path):
    with pytest.raises(RankFailed, match="A CPU backend must be enabled"):
        ranks(2, save_without_a_cpu, str(tmp_path), backend="none")


@pytest.mark.slow
def test_parts_become_one_file_and_other_parts(ranks, tmp_path):
    parts, again = str(tmp_path / "parts"), str(tmp_path / "again")
    whole = torch.arange(12.0).reshape(6, 2)
    assert ranks(2, shards.save_parts, parts).results == [
        whole[:3].tolist(),
        whole[3:].tolist(),
    ]
    dcp_to_torch_save(parts, tmp_path / "table.pt")
    assert torch.equal(torch.load(tmp_path / "table.pt")["table"], whole)
    torch_save_to_dcp(tmp_path / "table.pt", again)
    for folder in (parts, again):
        found = ranks(3, shards.load_parts, folder).results
        assert found == [rows.tolist() for rows in whole.chunk(3)]
