"""A run on several ranks is the run of one process, also one that stopped on the way."""

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


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_ranks_and_with_no_other_setting(
    trained, tmp_path
):
    run = RUN | {"checkpoint": str(tmp_path / "run.pt")}
    launch(sgd.train, 3, **run | {"epochs": 1})
    resumed = launch(sgd.train, 2, **run)
    assert "epoch 0" not in resumed.stdout[0] and "epoch 1" in resumed.stdout[0]
    losses, parameters = resumed.results[1]
    assert largest_difference(parameters, trained[0]) < 1e-12
    assert [len(row) for row in losses] == [4, 3]
    for name, other in {"batch": 478, "lr": 0.2, "double": False}.items():
        said = f"saved with {name}={RUN[name]}, now {name}={other} is asked for"
        with pytest.raises(RankFailed, match=said):
            launch(sgd.train, 2, **run | {name: other})
