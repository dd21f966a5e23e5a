"""Digits and pictures from disk, and those that stand in where there are none."""

import gzip
import hashlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate

from mgpu_tutorial.shared import data as shared_data
from mgpu_tutorial.shared.data import digits, pictures
from mgpu_tutorial.shared.vision import torchvision


@pytest.fixture(autouse=True)
def without_data(monkeypatch):
    monkeypatch.delenv("MGPU_DATA", raising=False)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("MGPU_DATA", str(tmp_path))
    return tmp_path


def small_digits():
    """The stored text of scikit-learn's file, by its checksum, as rows of whole numbers."""
    text = gzip.decompress(Path(shared_data.__file__).with_name("digits.csv.gz").read_bytes())
    assert hashlib.sha256(text).hexdigest() == (
        "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8"
    )
    return [[int(number) for number in line.split(",")] for line in text.decode().split()]


@pytest.mark.parametrize("train", [True, False])
def test_every_fifth_of_the_small_digits_is_for_testing(train):
    rows = [row for i, row in enumerate(small_digits()) if (i % 5 != 4) == train]
    assert len(rows) == (1438 if train else 359)
    data = digits(train)
    assert data.labels.tolist() == [row[64] for row in rows]
    pixels = torch.tensor([row[:64] for row in rows]).float().view(-1, 1, 8, 8) / 16
    large = interpolate(pixels, (28, 28), mode="bilinear")
    torch.testing.assert_close(data.images, (large - 0.306) / 0.325)
    assert abs(data.images.mean()) < 0.02 and abs(data.images.std() - 1) < 0.02
    assert digits(dtype=torch.float64).images.dtype == torch.float64
    with pytest.raises(ValueError, match="dtype=torch.int64 would cut them off"):
        digits(dtype=torch.int64)


def test_a_batch_is_enlarged_and_normalised_and_labels_go_with_it():
    data, index = pictures(), [7, 3, 3]
    small, labels = data.batch(index)
    torch.testing.assert_close(small, (data.images[index] / 255 - 0.46) / 0.25)
    large, same = data.batch(index, side=112)
    torch.testing.assert_close(large, interpolate(small, (112, 112), mode="bilinear"))
    assert torch.equal(labels, data.labels[index]) and torch.equal(labels, same)
    data.images.zero_()
    assert pictures().images.any()  # everybody has a copy


def test_mnist_and_cifar_are_used_where_they_are_on_disk(folder, monkeypatch):
    pixels = torch.arange(2 * 28 * 28, dtype=torch.uint8).view(2, 28, 28)
    colours = np.arange(2 * 3072, dtype=np.uint8).reshape(2, 32, 32, 3)

    def stored(data, kind, root, train, download):
        assert root == str(folder) and not download
        return SimpleNamespace(data=data, targets=kind([3 + train, 7]))

    monkeypatch.setattr(torchvision.datasets, "MNIST", partial(stored, pixels, torch.tensor))
    monkeypatch.setattr(torchvision.datasets, "CIFAR10", partial(stored, colours, list))
    data = digits()
    assert data.labels.tolist() == [4, 7] and digits(train=False).labels.tolist() == [3, 7]
    torch.testing.assert_close(data.images[:, 0], (pixels / 255 - 0.1307) / 0.3081)
    assert pictures().source == "generated pictures"  # a folder with something else
    (folder / "cifar-10-batches-py").mkdir()
    data = pictures()
    assert data.source == "CIFAR-10" and data.labels.tolist() == [4, 7]
    assert torch.equal(data.images, torch.tensor(colours).permute(0, 3, 1, 2))


MNIST, CIFAR = "MNIST/raw/train-images-idx3-ubyte", "cifar-10-batches-py/data_batch_1"


@pytest.mark.parametrize("data, inside", [(digits, MNIST), (pictures, CIFAR)])
def test_a_torn_data_set_is_refused_and_left_alone(folder, data, inside):
    torn = folder / inside
    torn.parent.mkdir(parents=True)
    torn.write_bytes(b"\x00\x00\x08\x03 half")
    with pytest.raises(
        ValueError, match="no readable (MNIST|CIFAR10) .* new folder: python -c"
    ):
        data()
    assert [path for path in folder.rglob("*") if path.is_file()] == [torn]
    assert torn.read_bytes() == b"\x00\x00\x08\x03 half"
