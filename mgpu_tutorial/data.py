"""Handwritten digits for several chapters: small ones that are always there, or full MNIST.

The small set is scikit-learn's copy of "Optical Recognition of Handwritten Digits": 1 797
real digits of 8 by 8 pixels (Alpaydin and Kaynak, 1998, https://doi.org/10.24432/C50P49,
licence CC BY 4.0), here enlarged to 28 by 28. Where the environment variable MGPU_DATA
names a folder with MNIST as torchvision stores it, that is used instead.
"""

import os
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn.functional import interpolate

DOWNLOAD = (
    "python -c \"from mgpu_tutorial.vision import torchvision as t; t.datasets.MNIST('{}', "
    'download=True)"'
)


class Digits(NamedTuple):
    """Images (N, 1, 28, 28), float32 in 0 to 1; labels (N,), int64; and where they are from."""

    images: torch.Tensor
    labels: torch.Tensor
    source: str

    def __len__(self) -> int:
        return len(self.labels)


def digits(train: bool = True) -> Digits:
    """The training digits (or the test digits), every fifth of the small set for testing.

    Raises ValueError where MGPU_DATA names a folder without a readable MNIST; nothing there
    is changed or deleted.
    """
    folder = os.environ.get("MGPU_DATA")
    return _mnist(Path(folder), train) if folder else _small(train)


def _small(train: bool) -> Digits:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    test = torch.arange(len(bunch.target)) % 5 == 4
    chosen = ~test if train else test
    images = torch.tensor(bunch.images, dtype=torch.float32)[chosen, None] / 16
    images = interpolate(images, size=(28, 28), mode="bilinear")
    return Digits(images, torch.tensor(bunch.target)[chosen], "scikit-learn's digits")


def _mnist(folder: Path, train: bool) -> Digits:
    from mgpu_tutorial.vision import torchvision

    try:
        data = torchvision.datasets.MNIST(str(folder), train=train, download=False)
    except Exception as error:  # whatever a torn file makes the reader raise
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"MGPU_DATA={folder} holds no readable MNIST ({reason}). Nothing was changed. "
            f"Unset MGPU_DATA for the small digits, or fetch MNIST into a new folder: "
            f"{DOWNLOAD.format('FOLDER')}"
        ) from None
    return Digits(data.data[:, None].float() / 255, data.targets, f"MNIST in {folder}")
