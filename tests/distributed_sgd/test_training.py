"""A run on several ranks is the run of one process, also one that stopped on the way."""

import os
import signal

import pytest
import torch

from mgpu_tutorial.distributed_sgd import sgd
from mgpu_tutorial.lab import RankFailed, launch
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet

# Four steps an epoch; the last has one sample, so that only rank 0 has a share in it.
RUN = {"epochs": 2, "batch": 479, "lr": 0.1, "double": True}


@pytest.fixture(scope="module")
def trained():
    """RUN in one process, by hand: the parameters, and by epoch each sample's losses."""
    torch.manual_seed(0)
    model, data, epochs = SmallConvNet().double(), digits(dtype=torch.float64), [[], []]
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    for epoch, losses in enumerate(epochs):
        generator = torch.Generator().manual_seed(1 + epoch)
        for batch in torch.randperm(len(data), generator=generator).split(479):
            output, labels = model(data.images[batch]), data.labels[batch]
            each = -output.gather(1, labels[:, None])[:, 0]
            gradients = torch.autograd.grad(each.mean(), list(model.parameters()))
            losses.append(each.detach())
            with torch.no_grad():
                for p, v, g in zip(model.parameters(), velocity, gradients, strict=True):
                    v.mul_(0.5).add_(g)
                    p.sub_(v, alpha=0.1)
    return torch.cat([p.detach().flatten() for p in model.parameters()]), epochs


@pytest.mark.parametrize("world_size", [1, 3])
def test_training_is_that_of_one_process_and_each_rank_says_its_losses(
    ranks, trained, world_size
):
    expected, epochs = trained
    rows = []
    for batches in epochs:
        cut = [batch.tensor_split(world_size) for batch in batches]
        shares = [torch.cat([parts[rank] for parts in cut]) for rank in range(world_size)]
        rows.append([share.mean().item() for share in [*shares, torch.cat(batches)]])
    report = ranks(world_size, sgd.train, **RUN)
    for rank, (losses, parameters) in enumerate(report.results):
        assert torch.equal(parameters, report.results[0][1])
        assert largest_difference(parameters, expected) < 1e-12
        assert largest_difference(losses, rows) < 1e-12
        assert report.stdout[rank].splitlines() == [
            f"rank {rank}, epoch {epoch}: loss {row[rank]:.4f}, all ranks {row[-1]:.4f}"
            for epoch, row in enumerate(losses)
        ]


def test_each_parameter_is_averaged_once_a_step(ranks):
    report = ranks(3, sgd.train, **RUN, trace=True)
    sent = [e.nbytes for e in report.events if e.rank == 0 and e.op == "all_reduce"]
    assert {event.op for event in report.events} == {"all_reduce", "all_gather"}
    assert len(sent) == 8 * 8 and sum(sent) == 8 * 8 * 21_840  # in eight steps of float64


def test_the_decay_shortens_the_parameters():
    model, optimizer = sgd.new_model(lr=0.5, decay=0.2)
    before = sgd.flat_parameters(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    torch.testing.assert_close(sgd.flat_parameters(model), 0.9 * before)


def train_until_a_power_cut(rank, world_size, steps, **run):
    """Rank 1 is killed before it averages for the last time."""
    taken, average_gradients = [], sgd.average_gradients

    def average(model):
        taken.append(model)
        if len(taken) > steps and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        average_gradients(model)

    sgd.average_gradients = average
    sgd.train(rank, world_size, **run)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_another_number_of_ranks_and_with_no_other_setting(
    trained, tmp_path
):
    run = RUN | {"checkpoint": str(tmp_path / "run.pt")}
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):  # in epoch 1
        launch(train_until_a_power_cut, 3, 6, **run)
    resumed = launch(sgd.train, 2, **run)
    assert "epoch 0" not in resumed.stdout[0] and "epoch 1" in resumed.stdout[0]
    losses, parameters = resumed.results[1]
    assert largest_difference(parameters, trained[0]) < 1e-12
    assert [len(row) for row in losses] == [4, 3]
    ended = launch(sgd.train, 1, **run)
    assert ended.stdout == [""] and ended.results[0][0] == losses
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]
    for name, other in {"batch": 478, "lr": 0.2, "double": False}.items():
        with pytest.raises(RankFailed, match="ranks 0 and 1 raised ValueError") as refused:
            launch(sgd.train, 2, **run | {name: other})
        said = f"saved with {name}={RUN[name]}, now {name}={other} is asked for"
        assert said in refused.value.tracebacks[1]
