"""What a loss must be, so that the parts of a batch add up to the mean of the whole."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

MOST = 10_000_000  # numbers of a batch's outputs up to which a loss is tried


def require_no_weights(loss_of: Callable) -> None:
    """ValueError for a partial whose keywords let classes count unequally."""
    given = loss_of.keywords if isinstance(loss_of, partial) else {}
    for name, usual in {"weight": None, "ignore_index": -100}.items():
        if given.get(name, usual) is not usual and given[name] != usual:
            raise ValueError(
                f"this loss has a {name}, so the mean of one process would divide by what "
                "counts, and not by the batch: leave weight and ignore_index out"
            )


def require_mean_of_parts(
    loss_of: Callable, shape: Sequence[int], parts: Sequence[tuple[Tensor, Tensor]]
) -> None:
    """ValueError unless the loss of a batch is the mean of the losses of its parts.

    `shape` is that of the output of one part, for which made-up numbers stand. Nothing is
    sent: ranks with the same targets see the same. Outputs of more than ten million numbers
    are not tried, and a loss that cannot take them says so when it is called.
    """
    targets, size = [target for _, target in parts], torch.Size(shape).numel()
    if len(parts) * size > MOST:
        return
    like = {"dtype": torch.get_default_dtype(), "device": targets[0].device}
    numbers = torch.arange(len(parts) * size, dtype=torch.float64).sin().abs() * 0.8 + 0.1
    outputs = list(numbers.to(**like).view(-1, *shape[1:]).split(shape[0]))
    try:
        each = [float(loss_of(*part)) for part in zip(outputs, targets, strict=True)]
        whole = float(loss_of(torch.cat(outputs), torch.cat(targets)))
    except (RuntimeError, ValueError, IndexError, TypeError):
        return
    mean = sum(each) / len(each)
    if not is_near(mean, whole, like["dtype"], 2e-5):
        raise ValueError(
            f"the loss of made-up outputs is {whole:.4g}, and the mean of its "
            f"{len(parts)} micro-batches {mean:.4g}: give a loss that is the mean of its "
            "samples, without weight and ignore_index"
        )


def is_near(found: float, expected: float, dtype: torch.dtype, within: float = 1e-3) -> bool:
    """True within the rounding of a sum in this dtype; NaN is near NaN."""
    pair = torch.tensor([found, expected], dtype=torch.float64, device="cpu")
    rtol = 0.03 if dtype.itemsize == 2 else within
    return bool(torch.isclose(*pair, rtol=rtol, atol=1e-8, equal_nan=True))
