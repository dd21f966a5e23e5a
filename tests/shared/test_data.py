"""Digits and pictures from disk, and those that stand in where there are none."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mgpu_tutorial.shared.data import digits, pictures
from mgpu_tutorial.shared.vision import torchvision


@pytest.fixture(autouse=True)
def without_data(monkeypatch):
    monkeypatch.delenv("MGPU_DATA", raising=False)


def test_every_fifth_of_the_small_digits_is_for_testing():
    from sklearn.datasets import load_digits

    table = load_digits()
    train, test = digits(), digits(train=False)
    for data, rows in ((train, np.arange(1797) % 5 != 4), (test, np.arange(1797) % 5 == 4)):
        assert data.labels.tolist() == table.target[rows].tolist()
        assert data.images.shape == (len(data), 1, 28, 28)
        pixels = torch.tensor(table.images[rows]).float()[:, None] / 16
        large = torch.nn.functional.interpolate(pixels, (28, 28), mode="bilinear")
        torch.testing.assert_close(data.images, (large - 0.306) / 0.325)
    assert abs(train.images.mean()) < 0.01 and abs(train.images.std() - 1) < 0.01
    assert digits(dtype=torch.float64).images.dtype == torch.float64


def test_generated_pictures_have_the_shape_of_cifar():
    train, test = pictures(), pictures(train=False)
    assert train.images.shape == (2000, 3, 32, 32) and train.images.dtype == torch.uint8
    assert train.source == "generated pictures" and len(test) == 500
    assert set(train.labels.tolist()) == set(range(10))
    assert torch.equal(pictures().images, train.images)
    assert not torch.equal(test.images, train.images[:500])


@pytest.mark.parametrize("index", [slice(5), [7, 3, 3]], ids=str)
def test_a_batch_is_enlarged_and_normalised_and_labels_go_with_it(index):
    data = pictures()
    small, labels = data.batch(index)
    torch.testing.assert_close(small, (data.images[index] / 255 - 0.46) / 0.25)
    large, same = data.batch(index, side=112)
    expected = torch.nn.functional.interpolate(small, (112, 112), mode="bilinear")
    torch.testing.assert_close(large, expected)
    assert torch.equal(labels, data.labels[index]) and torch.equal(labels, same)
    assert abs(data.batch(slice(None))[0].mean()) < 0.2


@pytest.mark.parametrize("data", [digits, pictures])
def test_data_is_made_on_the_default_device_and_is_the_callers_own(data):
    with torch.device("meta"):
        elsewhere = data()
    assert elsewhere.images.is_meta and elsewhere.labels.is_meta
    data().images.zero_()
    assert data().images.any() and not data().images.is_meta


def test_generated_pictures_can_be_learned():
    """The nearest mean of the spectrum tells their class far better than chance."""

    def features(data):
        spectrum = torch.fft.fft2(data.batch(slice(None))[0].mean(dim=1)).abs()
        return spectrum[:, :8].flatten(1)

    train, test = pictures(), pictures(train=False)
    known, asked = features(train), features(test)
    means = torch.stack([known[train.labels == c].mean(dim=0) for c in range(10)])
    found = torch.cdist(asked, means).argmin(dim=1)
    assert (found == test.labels).float().mean() > 0.6


def test_cifar_is_used_where_it_is_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("MGPU_DATA", str(tmp_path))
    assert pictures().source == "generated pictures"  # a folder with something else
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    with pytest.raises(ValueError, match="holds no readable CIFAR10") as caught:
        pictures()
    assert "t.datasets.CIFAR10('FOLDER', download=True)" in str(caught.value)
    rows = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 3072)
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        (folder / name).write_bytes(pickle.dumps({"data": rows, "labels": [3, 7]}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcdefghij")}))
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr(
        torchvision.datasets.cifar, "check_integrity", lambda *args: True, raising=False
    )
    data = pictures()
    assert data.source == "CIFAR-10" and data.images.shape == (10, 3, 32, 32)
    assert data.labels.tolist() == [3, 7] * 5
    assert torch.equal(data.images[1].flatten(), torch.from_numpy(rows[1]))


@pytest.mark.parametrize(("train", "label", "shade"), [(True, 1, 255), (False, 2, 51)])
def test_mnist_is_scaled_and_its_test_digits_are_others(
    tmp_path, monkeypatch, train, label, shade
):
    def fake(root, train, download):
        image = torch.full((1, 28, 28), 255 if train else 51, dtype=torch.uint8)
        labels = torch.tensor([1 if train else 2])
        return SimpleNamespace(data=image, targets=labels)

    monkeypatch.setenv("MGPU_DATA", str(tmp_path))
    monkeypatch.setattr(torchvision.datasets, "MNIST", fake)
    data = digits(train=train)
    assert data.labels.tolist() == [label]
    expected = torch.full((1, 1, 28, 28), (shade / 255 - 0.1307) / 0.3081)
    torch.testing.assert_close(data.images, expected)


def test_a_folder_without_a_whole_mnist_is_refused_and_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("MGPU_DATA", str(tmp_path))
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"):
        (raw / name).write_bytes(b"\x00\x00\x08\x03 half")
    for name in ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"):
        (raw / name).write_bytes(b"")
    before = {path.name: path.read_bytes() for path in raw.iterdir()}
    with pytest.raises(ValueError, match="holds no readable MNIST.*Nothing was changed"):
        digits()
    assert {path.name: path.read_bytes() for path in raw.iterdir()} == before
