"""N processes equal one, and each wrong way differs from it."""

from types import SimpleNamespace

import pytest
import torch

from mgpu_tutorial import distributed_sgd as sgd
from mgpu_tutorial.lab import RankFailed, launch
from mgpu_tutorial.shared.data import digits


@pytest.fixture(scope="module")
def alone():
    return {batch: launch(sgd.after_steps, 1, batch=batch).results[0] for batch in (7, 60)}


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("synchronise", [sgd.average_gradients, sgd.average_flat])
def test_n_processes_equal_one(alone, synchronise, world_size):
    results = launch(sgd.after_steps, world_size, synchronise).results
    torch.testing.assert_close(results, [alone[60]] * world_size, rtol=0, atol=1e-6)
    assert all(torch.equal(results[0], other) for other in results)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_unequal_shares_need_weights(alone, world_size):
    plain = launch(sgd.after_steps, world_size, batch=7).results
    assert (plain[0] - alone[7]).abs().max() > 1e-5
    weighted = launch(sgd.after_steps, world_size, batch=7, weight=sgd.by_share).results
    torch.testing.assert_close(weighted, [alone[7]] * world_size, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"synchronise": sgd.sum_gradients},
        {"synchronise": sgd.keep_gradients},
        {"own_start": True},
        {"reduction": "sum"},
    ],
)
def test_each_wrong_way_differs(alone, change):
    results = launch(sgd.after_steps, 2, **change).results
    assert max((other - alone[60]).abs().max() for other in results) > 1e-4


def test_a_sum_loss_with_a_sum_of_gradients_equals_one_process():
    one = launch(sgd.after_steps, 1, reduction="sum").results[0]
    summed = {"synchronise": sgd.sum_gradients, "reduction": "sum"}
    results = launch(sgd.after_steps, 2, **summed).results
    torch.testing.assert_close(results, [one] * 2, rtol=0, atol=1e-4)


def test_replicas_drift_apart_without_synchronisation_only():
    apart = launch(sgd.drift, 3, sgd.keep_gradients, steps=6).results
    together = launch(sgd.drift, 3, sgd.average_gradients, steps=6).results
    assert apart[0] == [0.0] * 6 and 0 < apart[1][0] < apart[1][-1]
    assert together == [[0.0] * 6] * 3


def test_training_lowers_the_loss_and_reads_digits():
    (losses, parameters), (same, other) = launch(
        sgd.train, 2, epochs=7, lr=0.1, timeout=120
    ).results
    assert losses[-1][-1] < losses[0][-1] / 5 and same == losses
    assert torch.equal(parameters, other) and sgd.accuracy(parameters) > 0.85


DOUBLE = {"epochs": 2, "lr": 0.1, "double": True}  # float32's rounding grows in 24 steps


@pytest.fixture(scope="module")
def trained_alone():
    return launch(sgd.train, 1, **DOUBLE).results[0]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_training_on_n_ranks_is_training_on_one(trained_alone, world_size):
    losses, parameters = trained_alone
    for other_losses, other in launch(sgd.train, world_size, **DOUBLE).results:
        torch.testing.assert_close(other, parameters, rtol=0, atol=1e-12)
        whole = [[row[-1] for row in rows] for rows in (losses, other_losses)]
        torch.testing.assert_close(whole[0], whole[1], rtol=0, atol=1e-12)
        assert len(other_losses[0]) == world_size + 1


def test_a_last_batch_smaller_than_the_world_is_no_nan():
    samples = len(digits())
    assert samples % 479 == 1  # the last batch has one sample, for two ranks
    losses, parameters = launch(sgd.train, 2, epochs=1, batch=479).results[1]
    assert parameters.isfinite().all() and losses[0][-1] > 0


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_batchnorm_and_dropout_part_from_one_process_and_group_norm_does_not(world_size):
    def compare(**layers):
        alone, _ = launch(sgd.with_layers, 1, **layers).results[0]
        results = launch(sgd.with_layers, world_size, **layers).results
        return (
            (results[0][0] - alone).abs().max().item() < 1e-6,
            all(torch.equal(results[0][0], weights) for weights, _ in results),
            all(torch.equal(results[0][1], seen) for _, seen in results),
        )

    assert compare() == (True, True, True)
    assert compare(norm="group") == (True, True, True)
    assert compare(norm="batch") == (False, True, False)
    assert compare(dropout=0.5) == (False, True, True)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_interrupted_and_resumed_is_uninterrupted(tmp_path, world_size):
    run = {"epochs": 2, "lr": 0.1}
    path = str(tmp_path / "run.pt")
    if world_size == 1:
        launch(sgd.train, 1, **run | {"epochs": 1}, checkpoint=path)
    else:  # an epoch has 12 steps: cut off in the middle of the second
        with pytest.raises(RankFailed, match="rank 1 was killed by SIGKILL"):
            cut = sgd.PowerCut(18)
            launch(sgd.train, world_size, **run, checkpoint=path, synchronise=cut)
    resumed = launch(sgd.train, world_size, **run, checkpoint=path)
    whole = launch(sgd.train, world_size, **run)
    assert "epoch 0" not in resumed.stdout[0] and "epoch 1" in resumed.stdout[0]
    for one, other in zip(resumed.results, whole.results, strict=True):
        assert one[0] == other[0] and torch.equal(one[1], other[1])
    assert [file.name for file in tmp_path.iterdir()] == ["run.pt"]


def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, trained_alone):
    path = str(tmp_path / "run.pt")
    launch(sgd.train, 3, **DOUBLE | {"epochs": 1}, checkpoint=path)
    losses, parameters = launch(sgd.train, 2, **DOUBLE, checkpoint=path).results[1]
    torch.testing.assert_close(parameters, trained_alone[1], rtol=0, atol=1e-12)
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
    launch(sgd.train, 2, epochs=1, batch=512, checkpoint=path)
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
