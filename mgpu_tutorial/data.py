"""Handwritten digits for several chapters: small ones that are always there, or full MNIST.

The small set is scikit-learn's copy of "Optical Recognition of Handwritten Digits": 1 797
real digits of 8 by 8 pixels (Alpaydin and Kaynak, 1998, https://doi.org/10.24432/C50P49,
licence CC BY 4.0), here enlarged to 28 by 28. Where the environment variable MGPU_DATA
names a folder with MNIST as torchvision stores it, that is used instead. The pixels are
normalised: mean 0 and standard deviation 1 over the training digits.
"""

import os
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import interpolate

DOWNLOAD = (
    'python -c "from mgpu_tutorial.vision import torchvision as t; '
    "t.datasets.MNIST('{}', download=True)\""
)


@dataclass(frozen=True)
class Digits:
    """Images (N, 1, 28, 28); labels (N,), int64; and where they are from."""

    images: torch.Tensor
    labels: torch.Tensor
    source: str

    def __len__(self) -> int:
        return len(self.labels)


def digits(train: bool = True, dtype: torch.dtype = torch.float32) -> Digits:
    """The training digits (or the test digits), every fifth of the small set for testing.

    Raises ValueError where MGPU_DATA names a folder without a readable MNIST; nothing there
    is changed or deleted.
    """
    folder = os.environ.get("MGPU_DATA")
    data = _mnist(Path(folder), train) if folder else _small(train)
    return replace(data, images=data.images.to(dtype))


def _small(train: bool) -> Digits:
    # Read scikit-learn's file without importing scikit-learn, which takes seconds a rank.
    package = Path(find_spec("sklearn").origin).parent
    table = np.loadtxt(package / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    table = torch.tensor(table, dtype=torch.float32)
    test = torch.arange(len(table)) % 5 == 4
    table = table[~test if train else test]
    images = table[:, None, :64].view(-1, 1, 8, 8) / 16
    images = (interpolate(images, size=(28, 28), mode="bilinear") - 0.306) / 0.325
    return Digits(images, table[:, 64].long(), "scikit-learn's digits")


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
    images = (data.data[:, None].float() / 255 - 0.1307) / 0.3081
    return Digits(images, data.targets, "full MNIST")
