"""The order of the data, and a run that loses ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.survival import elastic


def test_five_ranks_with_unequal_shares_take_the_steps_of_one(ranks):
    given = elastic.samples_of, torch.zeros(4, dtype=torch.float64), range(4)
    (one,) = ranks(1, elastic.train_on, *given).results
    for weight in ranks(5, elastic.train_on, *given).results:
        torch.testing.assert_close(weight, one, rtol=0, atol=1e-12)


def save_without_a_cpu(rank, world_size, folder):
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("cuda:gloo", store=store, rank=rank, world_size=world_size)
    dcp.async_save({"weight": torch.ones(2)}, checkpoint_id=folder)


@pytest.mark.slow
def test_saving_in_the_background_needs_a_backend_for_the_cpu(ranks, tmp_path):
    with pytest.raises(RankFailed, match="A CPU backend must be enabled"):
        ranks(2, save_without_a_cpu, str(tmp_path), backend="none")
