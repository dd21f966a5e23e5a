"""What the ranks compare to know that their models are alike."""

import hashlib

import torch
from torch import nn


def fingerprint(model: nn.Module) -> str:
    """Eight hexadecimal digits that stand for the bits of all parameters, in their order.

    Models that differ in a single bit share them by a chance of one in four billion.
    """
    bits = hashlib.sha256()
    for parameter in model.parameters():
        flat = parameter.detach().cpu().flatten()
        bits.update(flat.view(torch.uint8).numpy().tobytes())  # NumPy has no bfloat16
    return bits.hexdigest()[:8]
