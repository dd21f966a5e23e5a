"""What the ranks compare to know that their models are alike."""

import hashlib

import torch
import torch.distributed as dist
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


def require_same(thing: object, what: str, remedy: str, group: object = None) -> None:
    """All ranks of `group` compare `thing`, which can be pickled, with that of its rank 0.

    Raises ValueError on every rank alike where they differ: "rank 2 has other parameters
    than rank 0: build the same model on every rank", with `what` and `remedy` given.
    """
    everyone: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, thing, group=group)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise ValueError(f"rank {rank} has other {what} than rank 0: {remedy}")
