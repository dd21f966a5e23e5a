"""N processes equal one, and each wrong way differs from it."""

import os
import re
import signal
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from mgpu_tutorial import distributed_sgd as sgd
from mgpu_tutorial.data_partitioning import global_batches
from mgpu_tutorial.lab import RankFailed, launch
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet
from tests.thorough import TRAINED, again, thorough


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


def first_batches(batch, steps=3):
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


@cache
def alone(batch, norm="", steps=3):
    return one_process(first_batches(batch, steps), mean_loss, norm=norm)


STEPS = {1: 3, 2: 3, 3: 2, 4: 2}  # by world size: the second knows the momentum
BATCH = {"batch": 12, "steps": 3}
WRONG = {
    "sum_gradients": {"synchronise": sum_gradients},
    "keep_gradients": {"synchronise": keep_gradients},
    "own_model": {"make": own_model},
    "summed_loss": {"loss_of": summed_loss},
}
NORMS = ("group", "batch")
# world size, samples of a micro-batch, micro-batches of a step
SPLITS = [(1, 4, 1), (2, 2, 1), (2, 1, 2), (3, 2, 2)]
# An epoch of three steps, whose last one has two samples; float32's rounding would grow.
RUN = {"samples": 22, "epochs": 2, "lr": 0.1, "batch": 10, "double": True}


def ways_of(world_size):
    """What so many ranks do one after the other: a worker and its arguments, by name."""
    steps = {"steps": STEPS[world_size]}
    ways = {"right": (sgd.take_steps, BATCH | steps), "train": (train_on, RUN)}
    flat = {"synchronise": sgd.average_flat} if world_size > 2 else {}
    for norm in NORMS:
        make = partial(sgd.new_model, norm=norm)
        ways[norm] = sgd.vary_steps, BATCH | steps | flat | {"make": make}
    odd = {"batch": 7} | steps | flat
    ways["odd"] = sgd.vary_steps, odd
    ways["odd, weighted"] = sgd.vary_steps, odd | {"loss_of": sgd.shared_loss}
    for split in SPLITS:
        if split[0] == world_size:
            shares = {"micro_batch": split[1], "accumulation": split[2]}
            ways[split, "plain"] = accumulate, shares
            shares = shares | {"longest": 10}
            ways[split, "means"] = accumulate, shares
            by_all = {"factors_of": sgd.by_all_tokens}
            ways[split, "by all"] = accumulate, shares | by_all
    if world_size < 3:
        ways["small"] = train_each_on, {"samples": 300, "runs": list(WARM_UPS.values())}
    if world_size == 2:
        ways |= {name: (sgd.vary_steps, BATCH | way) for name, way in WRONG.items()}
        summed = {"synchronise": sum_gradients, "loss_of": summed_loss, "steps": 1}
        ways["sums"] = sgd.vary_steps, summed
        ways["tiny last"] = train_on, {"samples": 43, "epochs": 1, "batch": 14}
        ways["two epochs"] = train_on, TWO_EPOCHS
    if world_size == 3:
        for average in (sgd.average_gradients, sgd.average_flat):
            ways[average.__name__] = sgd.vary_steps, BATCH | steps | {"synchronise": average}
    return ways


def accumulate(rank, world_size, *split, **shares):
    """Three steps of `accumulate_steps`."""
    few = lambda *given, **more: global_batches(*given, **more)[:3]  # noqa: E731
    with patch.object(sgd, "global_batches", few):
        return sgd.accumulate_steps(rank, world_size, *split, **shares)


def each_way(rank, world_size, ways):
    return {name: work(rank, world_size, **given) for name, (work, given) in ways.items()}


@cache
def found(world_size):
    """The ranks' results by way, all of one launch: it takes longer than steps."""
    results = launch(each_way, world_size, ways_of(world_size)).results
    return {name: [ranks[name] for ranks in results] for name in results[0]}


def all_close(results, expected, atol=1e-6):
    torch.testing.assert_close(results, [expected] * len(results), rtol=0, atol=atol)


@pytest.mark.parametrize("world_size", [1, *TRAINED])
def test_n_processes_take_the_steps_of_one(world_size):
    results = found(world_size)["right"]
    all_close(results, alone(12, steps=STEPS[world_size]))
    assert all(torch.equal(results[0], other) for other in results)


@thorough
def test_the_varied_loop_is_the_right_one_if_nothing_is_varied():
    for way in ("average_gradients", "average_flat"):
        all_close(found(3)[way], alone(12, steps=STEPS[3]))


@pytest.mark.parametrize("world_size", TRAINED)
def test_unequal_shares_need_weights(world_size):
    plain, weighted = (found(world_size)[way] for way in ("odd", "odd, weighted"))
    expected = alone(7, steps=STEPS[world_size])
    assert (plain[0] - expected).abs().max() > 1e-5
    all_close(weighted, expected)


@pytest.mark.parametrize("name", WRONG)
def test_each_wrong_way_differs(name):
    assert max((other - alone(12)).abs().max() for other in found(2)[name]) > 1e-4


def test_a_sum_loss_with_a_sum_of_gradients_equals_one_process():
    expected = one_process(first_batches(60, 1), partial(summed_loss, batch=60))
    all_close(found(2)["sums"], expected)


@pytest.mark.parametrize("world_size", TRAINED)
def test_batchnorm_parts_from_one_process_and_group_norm_does_not(world_size):
    for norm in NORMS:
        results = found(world_size)[norm]
        expected = alone(12, norm, STEPS[world_size])
        assert ((results[0] - expected).abs().max() < 1e-6) == (norm == "group")
        assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("split", [*SPLITS[:3], again(SPLITS[3])])
def test_accumulation_is_one_batch_where_every_token_counts_alike(split):
    def token_mean(output, labels):
        tokens = 1 + labels % 10
        return -(output.gather(1, labels[:, None])[:, 0] * tokens).sum() / tokens.sum()

    world_size, micro_batch, accumulation = split
    batches = first_batches(world_size * micro_batch * accumulation)
    plain, means, by_all = (found(world_size)[split, w] for w in ("plain", "means", "by all"))
    all_close(plain, one_process(batches, mean_loss))
    expected = one_process(batches, token_mean)
    all_close(by_all, expected)
    assert ((means[0] - expected).abs().max() < 1e-6) == (split == (1, 4, 1))


def test_accumulating_reduces_once_per_step():
    calls = [
        len(launch(accumulate, *split, trace=True).events) for split in ((2, 2, 1), (2, 1, 2))
    ]
    assert calls[0] == calls[1] > 0


WARM_UPS = {n: (128, partial(torch.optim.SGD, lr=0.05), n) for n in (1, 5)}


@pytest.mark.parametrize("warm_up", WARM_UPS)
def test_a_small_run_on_two_ranks_is_one_process_with_a_warm_up(warm_up):
    data = part(digits(dtype=torch.float64), 300)
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
    for world_size in (1, 2):
        losses = [
            dict(zip(WARM_UPS, ends, strict=True)) for ends in found(world_size)["small"]
        ]
        assert [end[warm_up] for end in losses] == [
            pytest.approx(expected, abs=1e-5)
        ] * world_size


def test_the_linear_rule_keeps_the_loss_and_a_fixed_rate_does_not():
    run = partial(torch.optim.SGD, momentum=0.5)
    runs = [(16 * k, partial(run, lr=0.02 * f), 1) for k, f in ((1, 1), (8, 1), (8, 8))]
    one, fixed, linear = launch(sgd.train_each, 1, runs, timeout=120).results[0]
    assert fixed > 4 * one and abs(linear - one) < 0.1 * one


PARTS = ["", "model", "optimizer", "scheduler", "generator", "step"]


def resumed(rank, world_size):
    """How far runs that forgot something are from six plain steps without the chapter's."""
    data, order = digits(), first_batches(60, steps=6)
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
    with patch.object(sgd, "average_gradients", sgd.average_flat):
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
        sgd.train, 2, epochs=4, batch=64, lr=0.1, synchronise=sgd.average_flat, timeout=120
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
    with patch.object(sgd, "digits", lambda **kind: part(digits(**kind), samples)):
        return sgd.train(rank, world_size, **run)


def train_each_on(rank, world_size, samples, runs):
    """The same for `train_each`."""
    with patch.object(sgd, "digits", lambda **kind: part(digits(**kind), samples)):
        return sgd.train_each(rank, world_size, runs)


@pytest.mark.parametrize("world_size", TRAINED)
def test_training_on_n_ranks_is_training_on_one(world_size):
    losses, parameters = found(1)["train"][0]
    for other_losses, other in found(world_size)["train"]:
        torch.testing.assert_close(other, parameters, rtol=0, atol=1e-12)
        whole = [[row[-1] for row in rows] for rows in (losses, other_losses)]
        torch.testing.assert_close(whole[0], whole[1], rtol=0, atol=1e-12)
        assert len(other_losses[0]) == world_size + 1


def test_a_last_batch_smaller_than_the_world_is_no_nan():
    losses, parameters = found(2)["tiny last"][1]  # one sample, for two ranks
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


@pytest.mark.parametrize("world_size", [1, *TRAINED])
def test_interrupted_and_resumed_is_uninterrupted(tmp_path, world_size):
    path = str(tmp_path / "run.pt")
    if world_size == 1:
        launch(train_on, 1, **RUN | {"epochs": 1}, checkpoint=path)
    else:  # an epoch has 3 steps: cut off in the middle of the second
        with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):
            cut = PowerCut(4)
            launch(train_on, world_size, **RUN, checkpoint=path, synchronise=cut)
    resumed = launch(train_on, world_size, **RUN, checkpoint=path)
    assert "epoch 0" not in resumed.stdout[0] and "epoch 1" in resumed.stdout[0]
    for one, other in zip(resumed.results, found(world_size)["train"], strict=True):
        assert one[0] == other[0] and torch.equal(one[1], other[1])
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path):
    path = str(tmp_path / "run.pt")
    launch(train_on, 3, **RUN | {"epochs": 1}, checkpoint=path)
    losses, parameters = launch(train_on, 2, **RUN, checkpoint=path).results[1]
    torch.testing.assert_close(parameters, found(1)["train"][0][1], rtol=0, atol=1e-12)
    assert [len(row) for row in losses] == [4, 3]


def refused(rank, world_size, runs):
    """What each call of `train` says, which must refuse it."""
    said = []
    for run in runs:
        with pytest.raises(ValueError) as caught:
            sgd.train(rank, world_size, **run)
        said.append(str(caught.value))
    return said


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """By name: what `train` says of a checkpoint, and whether its file is as it was."""
    folder = tmp_path_factory.mktemp("checkpoints")
    files = {name: folder / name for name in ("empty", "torn", "other", "nothing")}
    files["empty"].write_bytes(b"")
    files["torn"].write_bytes(b"PK half a file")
    torch.save({"model": {}}, files["nothing"])
    launch(train_on, 2, 42, epochs=1, batch=512, checkpoint=str(files["other"]))
    before = {name: file.read_bytes() for name, file in files.items()}
    runs = [{"epochs": 1, "checkpoint": str(file)} for file in files.values()]
    runs += [{"epochs": 0}, {"batch": 0}]
    said = launch(refused, 1, runs).results[0]
    same = [file.read_bytes() == before[name] for name, file in files.items()]
    names = [*files, "no epochs", "no batch"]
    return dict(zip(names, zip(said, [*same, True, True], strict=True), strict=True))


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("empty", "holds no readable checkpoint .*Nothing was ch"),
        ("torn", "holds no readable checkpoint .*Nothing was ch"),
        ("other", "was saved with batch=512, now batch=128 is asked"),
        ("nothing", "no model and optimizer in it"),
        ("no epochs", "epochs and batch must be at least 1"),
        ("no batch", "epochs and batch must be at least 1"),
    ],
)
def test_a_run_is_refused_and_its_checkpoint_left_alone(refusals, name, says):
    said, same = refusals[name]
    assert re.search(says, said) and same


def test_ranks_refuse_a_torn_checkpoint_together_and_leave_it_alone(tmp_path):
    path = tmp_path / "run.pt"
    path.write_bytes(b"PK half a file")
    with pytest.raises(RankFailed, match="holds no readable checkpoint .*Nothing was ch"):
        launch(sgd.train, 2, epochs=1, checkpoint=str(path))
    assert path.read_bytes() == b"PK half a file"


def test_a_folder_that_is_not_there_is_said_before_training(tmp_path):
    with pytest.raises(RankFailed, match="no folder .*nowhere that can be written to"):
        launch(sgd.train, 2, epochs=1, checkpoint=str(tmp_path / "nowhere" / "run.pt"))


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


TWO_EPOCHS = {"samples": 43, "epochs": 2, "batch": 14, "lr": 0.1, "double": True}


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
    losses, parameters = found(2)["two epochs"][1]
    torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-12)
    assert [row[-1] for row in losses] == pytest.approx(epochs, abs=1e-12)
