"""What the killed run is compared by, its samples, and what saving meanwhile needs."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from mgpu_tutorial.ddp_buckets.wrappers import BucketedDDP
from mgpu_tutorial.lab import RankFailed
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.survival import elastic, figures


def test_no_sample_comes_twice():
    batches = [elastic.batch_of(step, rank)[0] for step in range(12) for rank in (0, 1)]
    assert len(torch.cat(batches).unique(dim=0)) == 12 * 2 * 16


def die_in_the_eleventh_step(rank, world_size, path):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def take_step(step):
        if rank == 1 and step == 10:
            raise RuntimeError("an accident")
        loss = model(torch.ones(2, 4)).sum()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()

    torch.manual_seed(0)
    with torch.no_grad():
        model.weight.fill_(1), model.bias.fill_(0)
    elastic.resume_or_start(
        path, model, optimizer, take_step, 12, lot=torch.default_generator
    )


def test_what_the_picture_shows_on_the_disk_is_in_the_file_after_a_crash(ranks, tmp_path):
    with pytest.raises(RankFailed):
        ranks(2, die_in_the_eleventh_step, str(tmp_path / "run.pt"))
    file = torch.load(tmp_path / "run.pt")
    assert file["step"] == 9 and [[*each] for each in file["also"]] == [["lot"], ["lot"]]
    assert "momentum_buffer" in file["optimizer"]["state"][0]
    held = "generator of rank 0; generator of rank 1"
    for frame in figures.after_a_crash().frames:
        assert f"the file: model, 9 steps; momentum; {held}" in frame.text


def test_two_runs_of_different_length_have_no_tensor_alike(ranks, tmp_path):
    folders = [str(tmp_path / name) for name in "ab"]
    for folder, steps in zip(folders, (3, 6), strict=True):
        os.mkdir(folder)
        ranks(2, elastic.train, folder, elastic.resume_or_start, steps)
    assert figures.same_bits(folders) == [False] * 8


def test_five_ranks_with_unequal_shares_take_the_steps_of_one(ranks):
    order, start = elastic.samples_of, torch.zeros(4, dtype=torch.float64)
    one = ranks(1, elastic.train_on, order, start, range(20)).results
    half = ranks(3, elastic.train_on, order, start, range(10)).results[0]
    ends = ranks(5, elastic.train_on, order, half, range(10, 20)).results
    assert largest_difference(ends, one * 5) < 1e-12


def save_without_a_cpu(rank, world_size, folder):
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("cuda:gloo", store=store, rank=rank, world_size=world_size)
    dcp.async_save({"weight": torch.ones(2)}, checkpoint_id=folder)


@pytest.mark.slow
def test_saving_in_the_background_needs_a_backend_for_the_cpu(ranks, tmp_path):
    with pytest.raises(RankFailed, match="A CPU backend must be enabled"):
        ranks(2, save_without_a_cpu, str(tmp_path), backend="none")


def six_steps(rank, world_size, wrapper, restart):
    """The parameters; with `restart` a new wrapper goes on from the third step's state."""

    def new():
        torch.manual_seed(0)
        layers = [m for _ in range(6) for m in (nn.Linear(96, 96), nn.Tanh())]
        model = nn.Sequential(*layers, nn.Linear(96, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, wrapper(model, bucket_cap_mb=0.05)

    model, optimizer, wrapped = new()
    for step in range(6):
        if restart and step == 3:
            states = model.state_dict(), optimizer.state_dict()
            model, optimizer, wrapped = new()
            for part, state in zip((model, optimizer), states, strict=True):
                part.load_state_dict(state)
        x = torch.randn(8, 96, generator=torch.Generator().manual_seed(10 * step + rank))
        cross_entropy(wrapped(x), torch.arange(8)).backward()
        getattr(wrapped, "finish_gradient_synchronization", lambda: None)()
        optimizer.step()
        optimizer.zero_grad()
    return parameters_to_vector(model.parameters()).detach()


@pytest.mark.slow
@pytest.mark.parametrize(
    "wrapper, is_same", [(BucketedDDP, True), (DistributedDataParallel, False)]
)
def test_the_last_bits_of_a_resumed_run_are_those_of_our_buckets(ranks, wrapper, is_same):
    through, resumed = (ranks(3, six_steps, wrapper, on).results[0] for on in (False, True))
    assert torch.equal(through, resumed) == is_same
    assert (through - resumed).abs().max() < 1e-6
