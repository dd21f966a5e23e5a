"""N processes equal one, and each wrong way differs from it."""

import os
import signal
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import avg_pool2d

from mgpu_tutorial import distributed_sgd as sgd
from mgpu_tutorial.lab import RankFailed, launch
from mgpu_tutorial.lab.measure import largest_difference
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet


def losses_of(output, labels):
    return -output.gather(1, labels[:, None])[:, 0]


def mean_loss(output, labels):
    return losses_of(output, labels).mean()


def summed_loss(output, labels, batch=0):
    return losses_of(output, labels).sum()


def one_process(batches, loss_of=mean_loss, lr=0.01, dtype=torch.float32, **layers):
    """Plain training in one process, written out: nothing of it is the chapter's."""
    torch.manual_seed(0)
    model = SmallConvNet(**layers).to(dtype)
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


# The loop


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_n_processes_take_the_steps_of_one(ranks, world_size):
    results = ranks(world_size, sgd.take_steps, steps=3, batch=12).results
    require_equal(results, one_process(batches_of(12)[:3]))


def test_five_steps_of_sixty_samples_are_taken_unless_told_otherwise(ranks):
    for worker in (sgd.take_steps, sgd.vary_steps):
        require_equal(ranks(2, worker).results, one_process(batches_of(60)[:5]))


@pytest.mark.parametrize(
    "average, calls", [(sgd.average_gradients, 8), (sgd.average_flat, 1)]
)
def test_gradients_are_averaged_one_by_one_or_together(ranks, average, calls):
    report = ranks(3, sgd.vary_steps, synchronise=average, steps=3, batch=12, trace=True)
    require_equal(report.results, one_process(batches_of(12)[:3]))
    sent = [event.nbytes for event in report.events if event.rank == 0]
    assert {event.op for event in report.events} == {"all_reduce"}
    assert len(sent) == 3 * calls and sum(sent) == 3 * 4 * 21_840


def test_a_seed_decides_the_first_parameters():
    first, again, other = (sgd.flat_parameters(sgd.new_model(seed)[0]) for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)


# The wrong ways, and their remedies


def sum_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def keep_gradients(model):
    pass


def own_model():
    return sgd.new_model(seed=dist.get_rank())


@pytest.mark.parametrize(
    "change",
    [
        {"synchronise": sum_gradients},
        {"synchronise": keep_gradients},
        {"make": own_model},
        {"loss_of": summed_loss},
    ],
    ids=["gradients summed", "gradients kept", "own start", "loss summed"],
)
def test_each_wrong_way_differs(ranks, change):
    expected = one_process(batches_of(12)[:3])
    results = ranks(2, sgd.vary_steps, batch=12, steps=3, **change).results
    assert max(largest_difference(result, expected) for result in results) > 1e-4


def test_a_sum_loss_with_a_sum_of_gradients_equals_one_process(ranks):
    change = {"loss_of": summed_loss, "synchronise": sum_gradients, "steps": 1}
    results = ranks(2, sgd.vary_steps, **change).results
    require_equal(results, one_process(batches_of(60)[:1], summed_loss))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_unequal_shares_need_weights(ranks, world_size):
    expected = one_process(batches_of(7)[:3])
    odd = {"batch": 7, "steps": 3}
    plain = ranks(world_size, sgd.vary_steps, **odd).results
    weighted = ranks(world_size, sgd.vary_steps, **odd, loss_of=sgd.shared_loss).results
    assert largest_difference(plain[0], expected) > 1e-5
    require_equal(weighted, expected)


@pytest.mark.parametrize("norm, agrees", [("group", True), ("batch", False)])
def test_batchnorm_parts_from_one_process_and_group_norm_does_not(ranks, norm, agrees):
    make = partial(sgd.new_model, norm=norm)
    results = ranks(2, sgd.vary_steps, batch=12, steps=3, make=make).results
    expected = one_process(batches_of(12)[:3], norm=norm)
    assert (largest_difference(results[0], expected) < 1e-6) == agrees
    assert torch.equal(results[0], results[1])


# Accumulation


def token_mean(output, labels):
    """A digit d stands for a text of d + 1 tokens with the same loss."""
    tokens = 1 + labels % 10
    return (losses_of(output, labels) * tokens).sum() / tokens.sum()


SPLITS = [(1, 4, 1), (2, 2, 1), (2, 1, 2), (3, 2, 2)]  # ranks, micro-batch, accumulation


@pytest.mark.parametrize("world_size, micro_batch, accumulation", SPLITS)
def test_accumulation_is_one_batch_where_every_token_counts_alike(
    ranks, world_size, micro_batch, accumulation
):
    split = world_size, sgd.accumulate_steps, micro_batch, accumulation
    batches = batches_of(world_size * micro_batch * accumulation)[:5]
    require_equal(ranks(*split).results, one_process(batches))
    expected = one_process(batches, token_mean)
    by_all = ranks(*split, longest=10, factors_of=sgd.by_all_tokens).results
    require_equal(by_all, expected)
    means = ranks(*split, longest=10).results
    is_one_batch = world_size == accumulation == 1
    assert (largest_difference(means[0], expected) < 1e-6) == is_one_batch


@pytest.mark.parametrize("accumulation", [1, 3])
def test_accumulating_reduces_once_per_step(ranks, accumulation):
    report = ranks(2, sgd.accumulate_steps, 1, accumulation, trace=True)
    assert [event.op for event in report.events] == ["all_reduce"] * 2 * 5 * 8


# The learning rate


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_small_run_is_that_of_one_process_with_a_warm_up(ranks, world_size):
    warm_ups = (1, 5)
    runs = [(128, partial(torch.optim.SGD, lr=0.05), steps) for steps in warm_ups]
    results = ranks(world_size, sgd.train_each, runs).results
    expected = [small_run(warm_up) for warm_up in warm_ups]
    assert results == [pytest.approx(expected, abs=1e-5)] * world_size


def small_run(warm_up):
    """Four epochs of a perceptron with one hidden layer, written out."""
    data = digits(dtype=torch.float64)
    images = avg_pool2d(data.images, 4).flatten(1)
    torch.manual_seed(0)
    layers = torch.nn.Linear(49, 64), torch.nn.Linear(64, 10)
    weights = [p for layer in layers for p in layer.double().parameters()]

    def output_of(batch):
        hidden = (images[batch] @ weights[0].T + weights[1]).clamp(min=0)
        return torch.log_softmax(hidden @ weights[2].T + weights[3], dim=1)

    batches = [batch for epoch in range(4) for batch in batches_of(128, epoch)]
    for step, batch in enumerate(batches):
        loss = mean_loss(output_of(batch), data.labels[batch])
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight.data -= 0.05 * min(1, (step + 1) / warm_up) * gradient
    return mean_loss(output_of(slice(None)), data.labels).item()


# Train, save, go on

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


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
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


def test_training_reads_digits(ranks):
    run = {"epochs": 4, "batch": 64, "lr": 0.1, "synchronise": sgd.average_flat}
    losses, parameters = ranks(2, sgd.train, **run, timeout=120).results[0]
    assert losses[-1][-1] < losses[0][-1] / 5 and parameters.dtype == torch.float32
    model, test = SmallConvNet(), digits(train=False)
    torch.nn.utils.vector_to_parameters(parameters, model.parameters())
    assert (model(test.images).argmax(dim=1) == test.labels).float().mean() > 0.85


class PowerCut:
    """Averages gradients until rank 1, at its step number `step`, is killed."""

    def __init__(self, step):
        self.left = step

    def __call__(self, model):
        self.left -= 1
        if self.left < 0 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        sgd.average_gradients(model)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_interrupted_and_resumed_is_uninterrupted(ranks, tmp_path, world_size):
    path = str(tmp_path / "run.pt")
    with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):  # in epoch 1
        launch(sgd.train, world_size, **RUN, checkpoint=path, synchronise=PowerCut(6))
    resumed = launch(sgd.train, world_size, **RUN, checkpoint=path)
    assert "epoch 0" not in resumed.stdout[0] and "epoch 1" in resumed.stdout[0]
    whole = ranks(world_size, sgd.train, **RUN)
    for one, other in zip(resumed.results, whole.results, strict=True):
        assert one[0] == other[0] and torch.equal(one[1], other[1])
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def test_a_run_goes_on_with_another_number_of_ranks(trained, tmp_path):
    path = str(tmp_path / "run.pt")
    launch(sgd.train, 3, **RUN | {"epochs": 1}, checkpoint=path)
    losses, parameters = launch(sgd.train, 2, **RUN, checkpoint=path).results[1]
    assert largest_difference(parameters, trained[0]) < 1e-12
    assert [len(row) for row in losses] == [4, 3]
    ended = launch(sgd.train, 1, **RUN, checkpoint=path)
    assert ended.stdout == [""] and ended.results[0][0] == losses


def refusal(rank, world_size, **run):
    """What `train` says of a run that it must refuse."""
    with pytest.raises(ValueError) as caught:
        sgd.train(rank, world_size, **run)
    return str(caught.value)


@pytest.mark.parametrize("content", [b"", b"PK half a file", {"model": {}}])
def test_a_file_that_is_no_checkpoint_is_refused_and_left_alone(ranks, tmp_path, content):
    path = tmp_path / "run.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    before = path.read_bytes()
    said = ranks(1, refusal, epochs=1, checkpoint=str(path)).results[0]
    assert str(path) in said and "holds no readable checkpoint" in said
    with pytest.raises(RankFailed, match="rank 0 raised ValueError"):
        launch(sgd.train, 2, epochs=1, checkpoint=str(path))
    assert path.read_bytes() == before


def test_ranks_refuse_the_checkpoint_of_another_run_together_and_leave_it_alone(
    ranks, tmp_path
):
    path = tmp_path / "run.pt"
    launch(sgd.train, 2, epochs=1, batch=719, checkpoint=str(path))
    before = path.read_bytes()
    results = ranks(2, refusal, epochs=1, checkpoint=str(path)).results
    assert all("was saved with batch=719, now batch=128 is asked" in s for s in results)
    assert path.read_bytes() == before


def test_a_folder_that_is_not_there_is_said_before_training(ranks, tmp_path):
    path = tmp_path / "nowhere" / "run.pt"
    said = ranks(1, refusal, epochs=1, checkpoint=str(path)).results[0]
    assert f"no folder {path.parent} that can be written to" in said


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"batch": 0}])
def test_no_epoch_and_no_batch_are_refused(wrong):
    assert "epochs and batch must be at least 1" in refusal(0, 1, **wrong)


# What a checkpoint must hold


def uninterrupted(world_size):
    """Six steps with dropout and a falling rate; each rank draws masks of its own."""
    torch.manual_seed(0)
    model, data = SmallConvNet(dropout=0.5), digits()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    states = [torch.Generator().manual_seed(rank).get_state() for rank in range(world_size)]
    for step, batch in enumerate(batches_of(60)[:6]):
        optimizer.zero_grad()
        for rank, mine in enumerate(batch.tensor_split(world_size)):
            torch.set_rng_state(states[rank])
            loss = mean_loss(model(data.images[mine]), data.labels[mine])
            (loss / world_size).backward()
            states[rank] = torch.get_rng_state()
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / 8)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("stop_after", [0, 3, 6])
def test_a_run_that_stops_and_goes_on_is_uninterrupted(ranks, stop_after):
    results = ranks(2, sgd.stop_and_resume, stop_after=stop_after).results
    require_equal(results, uninterrupted(2), within=1e-7)


@pytest.mark.parametrize("forget", ["model", "optimizer", "scheduler", "generator", "step"])
def test_a_checkpoint_needs_each_of_its_parts(ranks, forget):
    results = ranks(2, sgd.stop_and_resume, forget).results
    assert largest_difference(results[0], uninterrupted(2)) > 1e-5


def test_what_is_saved_does_not_change_with_the_run():
    run = sgd.new_run(rank=0)
    saved = sgd.save_run(run)
    before = saved["model"]["fc1.bias"].clone()
    torch.nn.init.constant_(run["model"].fc1.bias, 7.0)
    assert torch.equal(saved["model"]["fc1.bias"], before)
