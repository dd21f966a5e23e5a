"""N processes equal one, and each wrong way differs from it."""

import os
import signal
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial import distributed_sgd as sgd
from mgpu_tutorial.lab import RankFailed, launch
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the ranks have: more of them only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def one_process(batches, loss_of, **layers):
    """Plain training in one process, written out: nothing of it is the chapter's."""
    torch.manual_seed(0)
    model = SmallConvNet(**layers)
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    data = digits()
    for batch in batches:
        loss = loss_of(model(data.images[batch]), data.labels[batch])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, v, g in zip(model.parameters(), velocity, gradients, strict=True):
                v.mul_(0.5).add_(g)
                p.sub_(v, alpha=0.01)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def first_batches(batch, steps=5):
    order = torch.randperm(len(digits()), generator=torch.Generator().manual_seed(1))
    return order.split(batch)[:steps]


def mean_loss(output, labels):
    return -output.gather(1, labels[:, None]).mean()


def summed_loss(output, labels, batch):
    return -output.gather(1, labels[:, None]).sum()


def sum_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def keep_gradients(model):
    pass


def own_model():
    return sgd.new_model(seed=dist.get_rank())


@pytest.fixture(scope="module")
def alone():
    return {batch: one_process(first_batches(batch), mean_loss) for batch in (7, 60)}


def each_way(rank, world_size, worker, ways):
    return [worker(rank, world_size, **way) for way in ways]


def launch_each(worker, world_size, ways):
    """The ranks' results for each of `ways`, in one launch: it takes longer than steps."""
    results = launch(each_way, world_size, worker, ways).results
    return [list(ranks) for ranks in zip(*results, strict=True)]


def all_close(results, expected, atol=1e-6):
    torch.testing.assert_close(results, [expected] * len(results), rtol=0, atol=atol)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_n_processes_take_the_steps_of_one(alone, world_size):
    results = launch(sgd.take_steps, world_size).results
    all_close(results, alone[60])
    assert all(torch.equal(results[0], other) for other in results)


def test_the_varied_loop_is_the_right_one_if_nothing_is_varied(alone):
    ways = [{"synchronise": way} for way in (sgd.average_gradients, sgd.average_flat)]
    for results in launch_each(sgd.vary_steps, 3, ways):
        all_close(results, alone[60])


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_unequal_shares_need_weights(alone, world_size):
    ways = [{"batch": 7}, {"batch": 7, "loss_of": sgd.shared_loss}]
    plain, weighted = launch_each(sgd.vary_steps, world_size, ways)
    assert (plain[0] - alone[7]).abs().max() > 1e-5
    all_close(weighted, alone[7])


WRONG = {
    "sum_gradients": {"synchronise": sum_gradients},
    "keep_gradients": {"synchronise": keep_gradients},
    "own_model": {"make": own_model},
    "summed_loss": {"loss_of": summed_loss},
}


@pytest.fixture(scope="module")
def gone_wrong():
    results = launch_each(sgd.vary_steps, 2, list(WRONG.values()))
    return dict(zip(WRONG, results, strict=True))


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_way_differs(alone, gone_wrong, name):
    assert max((other - alone[60]).abs().max() for other in gone_wrong[name]) > 1e-4


def test_a_sum_loss_with_a_sum_of_gradients_equals_one_process():
    expected = one_process(first_batches(60, 1), partial(summed_loss, batch=60))
    summed = {"synchronise": sum_gradients, "loss_of": summed_loss, "steps": 1}
    all_close(launch(sgd.vary_steps, 2, **summed).results, expected)


NORMS = ("group", "batch")


@pytest.fixture(scope="module")
def normed_alone():
    return [one_process(first_batches(60), mean_loss, norm=norm) for norm in NORMS]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_batchnorm_parts_from_one_process_and_group_norm_does_not(normed_alone, world_size):
    ways = [{"make": partial(sgd.new_model, norm=norm)} for norm in NORMS]
    both = launch_each(sgd.vary_steps, world_size, ways)
    for norm, results, expected in zip(NORMS, both, normed_alone, strict=True):
        assert ((results[0] - expected).abs().max() < 1e-6) == (norm == "group")
        assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("split", [(1, 4, 1), (2, 2, 1), (2, 1, 2), (3, 2, 2)])
def test_accumulation_is_one_batch_where_every_token_counts_alike(split):
    def token_mean(output, labels):
        tokens = 1 + labels % 10
        return -(output.gather(1, labels[:, None])[:, 0] * tokens).sum() / tokens.sum()

    world_size, micro_batch, accumulation = split
    batch = world_size * micro_batch * accumulation
    shares = {"micro_batch": micro_batch, "accumulation": accumulation}
    ways = [{}, {"longest": 10}, {"longest": 10, "factors_of": sgd.by_all_tokens}]
    worker = partial(sgd.accumulate_steps, **shares)
    plain, means, by_all = launch_each(worker, world_size, ways)
    all_close(plain, one_process(first_batches(batch), mean_loss))
    expected = one_process(first_batches(batch), token_mean)
    all_close(by_all, expected)
    assert ((means[0] - expected).abs().max() < 1e-6) == (split == (1, 4, 1))


def test_accumulating_reduces_once_per_step():
    calls = [
        len(launch(sgd.accumulate_steps, *split, trace=True).events)
        for split in ((2, 2, 1), (2, 1, 2))
    ]
    assert calls[0] == calls[1] > 0


@pytest.mark.parametrize("warm_up", [1, 5])
def test_a_small_run_on_two_ranks_is_one_process_with_a_warm_up(warm_up):
    data = digits(dtype=torch.float64)
    images = torch.nn.functional.avg_pool2d(data.images, 4).flatten(1)
    torch.manual_seed(0)
    layers = torch.nn.Linear(49, 64), torch.nn.Linear(64, 10)
    weights = [p for layer in layers for p in layer.double().parameters()]
    step = 0
    for epoch in range(4):
        generator = torch.Generator().manual_seed(1 + epoch)
        for batch in torch.randperm(len(data), generator=generator).split(128):
            hidden = (images[batch] @ weights[0].T + weights[1]).clamp(min=0)
            output = torch.log_softmax(hidden @ weights[2].T + weights[3], dim=1)
            gradients = torch.autograd.grad(mean_loss(output, data.labels[batch]), weights)
            step += 1
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.data -= 0.05 * min(1, step / warm_up) * gradient
    hidden = (images @ weights[0].T + weights[1]).clamp(min=0)
    output = torch.log_softmax(hidden @ weights[2].T + weights[3], dim=1)
    expected = mean_loss(output, data.labels).item()
    run = (128, partial(torch.optim.SGD, lr=0.05), warm_up)
    for world_size in (1, 2):
        results = launch(sgd.train_each, world_size, [run]).results
        assert results == [[pytest.approx(expected, abs=1e-5)]] * world_size


def test_the_linear_rule_keeps_the_loss_and_a_fixed_rate_does_not():
    run = partial(torch.optim.SGD, momentum=0.5)
    runs = [(16 * k, partial(run, lr=0.02 * f), 1) for k, f in ((1, 1), (8, 1), (8, 8))]
    one, fixed, linear = launch(sgd.train_each, 1, runs, timeout=120).results[0]
    assert fixed > 4 * one and abs(linear - one) < 0.1 * one


PARTS = ["", "model", "optimizer", "scheduler", "generator", "step"]


def resumed(rank, world_size):
    """How far runs that forgot something are from six plain steps without the chapter's."""
    data, order = digits(), first_batches(60, 6)
    torch.manual_seed(0)
    model = SmallConvNet(dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    torch.manual_seed(rank)
    for step, batch in enumerate(order):
        mine = batch.tensor_split(world_size)[rank]
        optimizer.zero_grad()
        mean_loss(model(data.images[mine]), data.labels[mine]).backward()
        sum_gradients(model)
        for parameter in model.parameters():
            parameter.grad /= world_size
        optimizer.param_groups[0]["lr"] = 0.01 * (1 - step / 8)
        optimizer.step()
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    runs = {forget: sgd.stop_and_resume(rank, world_size, forget) for forget in PARTS}
    return {forget: (run - expected).abs().max().item() for forget, run in runs.items()}


@pytest.fixture(scope="module")
def distances():
    return launch(resumed, 2).results


@pytest.mark.parametrize("forget", PARTS)
def test_a_checkpoint_needs_each_of_its_parts(distances, forget):
    assert all((ranks[forget] < 1e-7) == (forget == "") for ranks in distances)


def test_training_lowers_the_loss_and_reads_digits():
    (losses, parameters), (same, other) = launch(
        sgd.train, 2, epochs=7, lr=0.1, timeout=120
    ).results
    assert losses[-1][-1] < losses[0][-1] / 5 and same == losses
    assert torch.equal(parameters, other)
    model, test = SmallConvNet(), digits(train=False)
    torch.nn.utils.vector_to_parameters(parameters, model.parameters())
    assert (model(test.images).argmax(dim=1) == test.labels).float().mean() > 0.85


def part(data, samples):
    return replace(data, images=data.images[:samples], labels=data.labels[:samples])


def train_on(rank, world_size, samples, **run):
    """`train` where there are no more digits than these: what is compared needs few."""
    sgd.digits = lambda **kind: part(digits(**kind), samples)
    return sgd.train(rank, world_size, **run)


# An epoch of five steps, whose last one has two samples; float32's rounding would grow.
RUN = {"samples": 42, "epochs": 2, "lr": 0.1, "batch": 10, "double": True}


@cache
def trained(world_size):
    return launch(train_on, world_size, **RUN).results


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_training_on_n_ranks_is_training_on_one(world_size):
    losses, parameters = trained(1)[0]
    for other_losses, other in trained(world_size):
        torch.testing.assert_close(other, parameters, rtol=0, atol=1e-12)
        whole = [[row[-1] for row in rows] for rows in (losses, other_losses)]
        torch.testing.assert_close(whole[0], whole[1], rtol=0, atol=1e-12)
        assert len(other_losses[0]) == world_size + 1


def test_a_last_batch_smaller_than_the_world_is_no_nan():
    run = {"samples": 43, "epochs": 1, "batch": 14}  # the last has one, for two ranks
    losses, parameters = launch(train_on, 2, **run).results[1]
    assert parameters.isfinite().all() and losses[0][-1] > 0


class PowerCut:
    """Averages gradients until rank 1, at its step number `step`, is killed."""

    def __init__(self, step):
        self.left = step

    def __call__(self, model):
        self.left -= 1
        if self.left < 0 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        sgd.average_gradients(model)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_interrupted_and_resumed_is_uninterrupted(tmp_path, world_size):
    path = str(tmp_path / "run.pt")
    if world_size == 1:
        launch(train_on, 1, **RUN | {"epochs": 1}, checkpoint=path)
    else:  # an epoch has 5 steps: cut off in the middle of the second
        with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):
            cut = PowerCut(7)
            launch(train_on, world_size, **RUN, checkpoint=path, synchronise=cut)
    resumed = launch(train_on, world_size, **RUN, checkpoint=path)
    assert "epoch 0" not in resumed.stdout[0] and "epoch 1" in resumed.stdout[0]
    for one, other in zip(resumed.results, trained(world_size), strict=True):
        assert one[0] == other[0] and torch.equal(one[1], other[1])
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    path = str(tmp_path / "run.pt")
    launch(train_on, 3, **RUN | {"epochs": 1}, checkpoint=path)
    losses, parameters = launch(train_on, 2, **RUN, checkpoint=path).results[1]
    torch.testing.assert_close(parameters, trained(1)[0][1], rtol=0, atol=1e-12)
    assert [len(row) for row in losses] == [4, 3]


def test_a_torn_checkpoint_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "run.pt"
    for text in (b"", b"PK half a file"):
        path.write_bytes(text)
        with pytest.raises(RankFailed, match="holds no readable checkpoint .*Nothing was ch"):
            launch(sgd.train, 2, epochs=1, checkpoint=str(path))
        assert path.read_bytes() == text


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    path = str(tmp_path / "run.pt")
    launch(train_on, 2, 42, epochs=1, batch=512, checkpoint=path)
    with pytest.raises(RankFailed, match="was saved with batch=512, now batch=128 is asked"):
        launch(sgd.train, 2, epochs=1, checkpoint=path)
    torch.save({"model": {}}, path)
    with pytest.raises(RankFailed, match="no model and optimizer in it"):
        launch(sgd.train, 2, epochs=1, checkpoint=path)


def test_a_folder_that_is_not_there_is_said_before_training(tmp_path):
    with pytest.raises(RankFailed, match="no folder .*nowhere that can be written to"):
        launch(sgd.train, 2, epochs=1, checkpoint=str(tmp_path / "nowhere" / "run.pt"))


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"batch": 0}])
def test_training_nothing_is_refused(wrong):
    with pytest.raises(RankFailed, match="epochs and batch must be at least 1"):
        launch(sgd.train, 1, **wrong)


def times_on_a_clock_that_is_set(rank, world_size):
    """Three readings for each method in each step: before, between and after its halves."""
    steps = [(0, 4, 5, 10, 19, 22), (30, 32, 37, 40, 48, 52), (60, 63, 65, 70, 77, 83)]
    readings = iter(sum(steps, ()))
    sgd.time = SimpleNamespace(perf_counter=lambda: next(readings))
    methods = [sgd.average_gradients, sgd.average_flat]
    return sgd.step_times(rank, world_size, methods, steps=3)


def test_step_times_are_the_least_seconds_of_each_half_by_method():
    """Computation takes 4, 2, 3 and 9, 8, 7 seconds, communication 1, 5, 2 and 3, 4, 6."""
    expected = {"average_gradients": (2, 1), "average_flat": (7, 3)}
    assert launch(times_on_a_clock_that_is_set, 2).results == [expected] * 2


def test_the_small_digits_are_split_once(monkeypatch):
    monkeypatch.delenv("MGPU_DATA", raising=False)
    train, test = digits(), digits(train=False)
    assert len(train) + len(test) == 1797 and train.images.shape[1:] == (1, 28, 28)
    assert abs(train.images.mean()) < 0.01 and abs(train.images.std() - 1) < 0.01
    assert train.source == "scikit-learn's digits"


def test_the_small_digits_are_scikit_learns(monkeypatch):
    from sklearn.datasets import load_digits

    monkeypatch.delenv("MGPU_DATA", raising=False)
    expected = torch.tensor(load_digits().target)
    assert torch.equal(digits(train=False).labels, expected[4::5])
    darkest = digits(train=False).images.amax(dim=(1, 2, 3))
    assert darkest.min() > 1  # every image has a stroke in it


def test_a_folder_without_mnist_is_refused_and_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("MGPU_DATA", str(tmp_path))
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        (raw / name).write_bytes(b"\x00\x00\x08\x03 half")
    for name in ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        (raw / name).write_bytes(b"")
    before = sorted(path.name for path in raw.iterdir())
    with pytest.raises(ValueError, match="holds no readable MNIST") as caught:
        digits()
    assert "Nothing was changed" in str(caught.value)
    assert sorted(path.name for path in raw.iterdir()) == before


def test_a_whole_mnist_is_used(tmp_path, monkeypatch):
    from mgpu_tutorial.shared.vision import torchvision

    images, labels = torch.zeros(3, 28, 28, dtype=torch.uint8), torch.tensor([1, 2, 3])

    def fake(root, train, download):
        assert root == str(tmp_path) and not download
        return type("MNIST", (), {"data": images, "targets": labels})()

    monkeypatch.setenv("MGPU_DATA", str(tmp_path))
    monkeypatch.setattr(torchvision.datasets, "MNIST", fake)
    data = digits()
    assert data.source == "full MNIST" and data.labels.tolist() == [1, 2, 3]


def test_two_epochs_are_those_of_one_process():
    """Every epoch in an order of its own, and the last batch, of one sample, counts whole."""
    torch.manual_seed(0)
    model, data = SmallConvNet().double(), part(digits(dtype=torch.float64), 43)
    velocity = [torch.zeros_like(p) for p in model.parameters()]
    epochs = []
    for epoch in range(2):
        generator, summed = torch.Generator().manual_seed(1 + epoch), 0.0
        for batch in torch.randperm(len(data), generator=generator).split(14):
            loss = mean_loss(model(data.images[batch]), data.labels[batch])
            summed += loss.item() * len(batch)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for p, v, g in zip(model.parameters(), velocity, gradients, strict=True):
                    v.mul_(0.5).add_(g)
                    p.sub_(v, alpha=0.1)
        epochs.append(summed / len(data))
    expected = torch.cat([p.detach().flatten() for p in model.parameters()])
    run = {"samples": 43, "epochs": 2, "batch": 14, "lr": 0.1, "double": True}
    losses, parameters = launch(train_on, 2, **run).results[1]
    torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)
    assert [row[-1] for row in losses] == pytest.approx(epochs, abs=1e-12)
