"""Images for several chapters: handwritten digits, and small pictures in colour.

The small set of digits is scikit-learn's copy of "Optical Recognition of Handwritten
Digits": 1 797 real digits of 8 by 8 pixels (Alpaydin and Kaynak, 1998,
https://doi.org/10.24432/C50P49, licence CC BY 4.0), here enlarged to 28 by 28. The file lies
beside this one, and so does its licence.
Where the environment variable MGPU_DATA names a folder with MNIST as torchvision stores it,
that is used instead. Over the training digits the pixels have mean 0, standard deviation 1.

The pictures are CIFAR-10's (A. Krizhevsky, 2009, https://www.cs.toronto.edu/~kriz/cifar.html)
where that folder has them as torchvision stores them. Elsewhere they are generated: of the
same shape, with ten classes that a network can learn, but no photographs.
"""

import math
import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate


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

    Raises ValueError where MGPU_DATA names a folder without a readable MNIST, and for a
    `dtype` of whole numbers, which would cut the pixels off.
    """
    if not dtype.is_floating_point:
        raise ValueError(f"digits are fractions: dtype={dtype} would cut them off")
    if os.environ.get("MGPU_DATA"):
        data = _stored("MNIST", train, "the small digits")
        images = (data.data[:, None].float() / 255 - 0.1307) / 0.3081
        return Digits(images.to(dtype), data.targets, "full MNIST")
    rows = _table()
    test = np.arange(len(rows)) % 5 == 4
    table = torch.tensor(rows[~test if train else test], dtype=torch.float32)
    images = table[:, None, :64].view(-1, 1, 8, 8) / 16
    images = interpolate(images, size=(28, 28), mode="bilinear").sub_(0.306).div_(0.325)
    return Digits(images.to(dtype), table[:, 64].long(), "scikit-learn's digits")


@cache
def _table() -> np.ndarray:
    """A row per digit: 64 pixels and a label."""
    path = Path(__file__).with_name("digits.csv.gz")
    return np.loadtxt(path, dtype=np.int64, delimiter=",")


def _stored(name: str, train: bool, otherwise: str) -> Any:
    """One of torchvision's data sets from disk; ValueError where it cannot be read."""
    from mgpu_tutorial.shared.vision import torchvision

    folder = os.environ["MGPU_DATA"]
    try:
        return getattr(torchvision.datasets, name)(folder, train=train, download=False)
    except Exception as error:  # whatever a torn file makes the reader raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(
            f"MGPU_DATA={folder} holds no readable {name} ({reason}). Nothing was changed. "
            f"Unset MGPU_DATA for {otherwise}, or fetch {name} into a new folder: "
            'python -c "from mgpu_tutorial.shared.vision import torchvision as t; '
            f"t.datasets.{name}('FOLDER', download=True)\""
        ) from None


class Pictures(Digits):
    """Images (N, 3, 32, 32), uint8; labels (N,), int64, 0 to 9; and where they are from."""

    def batch(self, index: list[int] | slice, side: int = 32) -> tuple[torch.Tensor, ...]:
        """Pictures (n, 3, side, side), float32, enlarged and normalised, and their labels."""
        images = self.images[index].to(torch.get_default_dtype()) / 255
        images = interpolate(images, size=(side, side), mode="bilinear")
        return (images - 0.46) / 0.25, self.labels[index]


def pictures() -> Pictures:
    """The training pictures; ValueError if MGPU_DATA's CIFAR-10 cannot be read."""
    folder = os.environ.get("MGPU_DATA")
    if folder and Path(folder, "cifar-10-batches-py").is_dir():
        data = _stored("CIFAR10", True, "generated pictures")
        images = torch.from_numpy(data.data).permute(0, 3, 1, 2).contiguous()
        return Pictures(images, torch.tensor(data.targets), "CIFAR-10")
    with torch.device("cpu"):
        drawn = _generated()
    device = torch.get_default_device()
    return Pictures(*(part.to(device, copy=True) for part in drawn), "generated pictures")


@cache
def _generated() -> tuple[torch.Tensor, torch.Tensor]:
    """Stripes in a direction and a tint that tell the class, under noise; drawn once."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randperm(2000, generator=generator) % 10
    angle = labels * (math.pi / 10)
    y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    shift = 6.28 * torch.rand(len(labels), 1, 1, generator=generator)
    along = angle.cos()[:, None, None] * x + angle.sin()[:, None, None] * y
    tint = 0.5 + 0.5 * torch.cos(angle[:, None] * 2 + torch.tensor([0.0, 2.1, 4.2]))
    stripes = 0.5 + 0.3 * torch.sin(along * 0.8 + shift)
    noise = torch.randn(len(labels), 3, 32, 32, generator=generator)
    images = stripes[:, None] * (0.6 + 0.6 * tint[:, :, None, None]) + 0.15 * noise
    return (255 * images.clamp(0, 1)).byte(), labels
