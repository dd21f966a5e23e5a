"""What the ranks compare to know that their models are alike."""

import hashlib
from collections.abc import Iterable

import torch
from torch import nn


def fingerprint(model: nn.Module) -> str:
    """Eight hexadecimal digits that stand for the bits of all parameters, in their order.

    Models that differ in a single bit share them by a chance of one in four billion.
    """
    return fingerprint_of(model.parameters())


def fingerprint_of(tensors: Iterable[torch.Tensor]) -> str:
    """The same digits for some tensors."""
    bits = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().flatten()
        bits.update(flat.view(torch.uint8).numpy().tobytes())  # NumPy has no bfloat16
    return bits.hexdigest()[:8]
