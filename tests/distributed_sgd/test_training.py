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

# One process: nothing of it is the chapter's


def losses_of(output, labels):
    return -output.gather(1, labels[:, None])[:, 0]


def mean_loss(output, labels):
    return losses_of(output, labels).mean()


def one_process(batches, loss_of=mean_loss, lr=0.01, dtype=torch.float32):
    """The parameters after a step per batch, of SGD with a momentum of 0.5."""
    torch.manual_seed(0)
    model = SmallConvNet().to(dtype)
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    data = digits(dtype=dtype)
    for batch in batches:
        loss = loss_of(model(data.images[batch]), data.labels[batch])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, v, g in zip(model.parameters(), velocity, gradients, strict=True):
                v.mul_(0.5).add_(g)
                p.sub_(v, alpha=lr)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def batches_of(batch, epoch=0):
    generator = torch.Generator().manual_seed(1 + epoch)
    return torch.randperm(len(digits()), generator=generator).split(batch)


def require_equal(results, expected, within=1e-6):
    """All ranks have the same bits, and nearly those of one process."""
    assert all(torch.equal(other, results[0]) for other in results)
    assert largest_difference(results[0], expected) < within


# Four steps an epoch; the last has one sample, so that only rank 0 has a share in it.
RUN = {"epochs": 2, "batch": 479, "lr": 0.1, "double": True}


@pytest.fixture(scope="module")
def trained():
    """One process: the parameters, and by epoch and batch the loss of each sample."""
    losses = []

    def recorded_loss(output, labels):
        each = losses_of(output, labels)
        losses.append(each.detach())
        return each.mean()

    batches = [*batches_of(479, epoch=0), *batches_of(479, epoch=1)]
    parameters = one_process(batches, recorded_loss, lr=0.1, dtype=torch.float64)
    return parameters, [losses[:4], losses[4:]]


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
    require_equal([parameters for _, parameters in report.results], expected, within=1e-12)
    for rank, (losses, _) in enumerate(report.results):
        assert largest_difference(losses, rows) < 1e-12
        assert report.stdout[rank].splitlines() == [
            f"rank {rank}, epoch {epoch}: loss {row[rank]:.4f}, all ranks {row[-1]:.4f}"
            for epoch, row in enumerate(losses)
        ]


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


def test_each_parameter_is_averaged_once_a_step(ranks):
    report = ranks(3, sgd.train, **RUN, trace=True)
    sent = [e.nbytes for e in report.events if e.rank == 0 and e.op == "all_reduce"]
    assert {event.op for event in report.events} == {"all_reduce", "all_gather"}
    assert len(sent) == 8 * 8 and sum(sent) == 8 * 8 * 21_840  # in eight steps of float64


@pytest.mark.slow
def test_interrupted_and_resumed_is_uninterrupted(ranks, tmp_path):
    run = RUN | {"checkpoint": str(tmp_path / "run.pt")}
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):  # in epoch 1
        launch(train_until_a_power_cut, 2, 6, **run)
    resumed = launch(sgd.train, 2, **run)
    assert "epoch 0" not in resumed.stdout[0] and "epoch 1" in resumed.stdout[0]
    whole = ranks(2, sgd.train, **RUN)
    for one, other in zip(resumed.results, whole.results, strict=True):
        assert one[0] == other[0] and torch.equal(one[1], other[1])
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks_and_with_no_other_setting(
    trained, tmp_path
):
    path = str(tmp_path / "run.pt")
    launch(sgd.train, 3, **RUN | {"epochs": 1}, checkpoint=path)
    losses, parameters = launch(sgd.train, 2, **RUN, checkpoint=path).results[1]
    assert largest_difference(parameters, trained[0]) < 1e-12
    assert [len(row) for row in losses] == [4, 3]
    ended = launch(sgd.train, 1, **RUN, checkpoint=path)
    assert ended.stdout == [""] and ended.results[0][0] == losses
    for name, other in {"batch": 478, "lr": 0.2, "double": False}.items():
        with pytest.raises(RankFailed, match="ranks 0 and 1 raised ValueError") as refused:
            launch(sgd.train, 2, **RUN | {name: other}, checkpoint=path)
        said = f"saved with {name}={RUN[name]}, now {name}={other} is asked for"
        assert said in refused.value.tracebacks[1]
