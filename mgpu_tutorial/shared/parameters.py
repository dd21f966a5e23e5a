"""What the ranks compare to know that their models, or their tasks, are alike."""

import hashlib
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from mgpu_tutorial.shared.groups import size_of


def fingerprint(model: nn.Module) -> str:
    """Eight hexadecimal digits that stand for the bits of all parameters, in their order.

    Models that differ in a single bit share them by a chance of one in four billion.
    """
    return fingerprint_of(model.parameters())


def require_agreement(
    mine: Mapping[str, object], group: dist.ProcessGroup | None = None
) -> None:
    """ValueError, on every rank, where the ranks of a group say different things by a name.

    All of them call it, once, before they rely on one another: gloo moves bytes, and doesn't
    ask what they are. A group of the backend "fake" has no other ranks to ask.
    """
    everyone: list = [dict(mine)] * size_of(group)
    if dist.get_backend(group) != "fake":
        dist.all_gather_object(everyone, dict(mine), group=group)
    for name, first in everyone[0].items():
        for rank, other in enumerate(everyone):
            if other.get(name) != first:
                raise ValueError(
                    f"{name}: {first} on rank 0 and {other.get(name)} on rank {rank}, but "
                    "all ranks must have the same"
                )


def fingerprint_of(tensors: Iterable[torch.Tensor]) -> str:
    """The same digits for some tensors."""
    bits = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().flatten()
        bits.update(flat.view(torch.uint8).numpy().tobytes())  # NumPy has no bfloat16
    return bits.hexdigest()[:8]
