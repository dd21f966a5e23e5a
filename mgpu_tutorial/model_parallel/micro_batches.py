"""A batch in micro-batches, and what a device or a rank does with one of them."""

from typing import NamedTuple

from torch import Tensor


class Task(NamedTuple):
    """What a device does at one time: `row` is its rank or number, times are in seconds."""

    begin: float
    end: float
    row: int
    stage: int
    kind: str  # F for forward, B for backward
    micro: int


def equal_parts(inputs: Tensor, targets: Tensor, micro: int) -> list[tuple[Tensor, Tensor]]:
    """The batch in `micro` equal parts, each with its inputs and its targets."""
    if len(inputs) % micro:
        raise ValueError(f"{len(inputs)} samples have no {micro} equal parts")
    return list(zip(inputs.chunk(micro), targets.chunk(micro), strict=True))


def labels_in(targets: Tensor) -> Tensor | int:
    """How many targets count in a mean: of whole numbers those that aren't -100."""
    return targets.numel() if targets.is_floating_point() else (targets != -100).sum()
