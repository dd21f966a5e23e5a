"""What a loss must be, so that the parts of a batch add up to the mean of the whole."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from types import BuiltinFunctionType, FunctionType

import torch
from torch import Tensor, nn

MOST = 10_000_000  # numbers of a batch's outputs up to which a loss is tried
MIDDLE = 4096  # classes up to which all are tried; of more, both ends


def require_each_once(loss_of: Callable, output: Tensor, labels: Tensor) -> None:
    """ValueError unless the loss of a batch is the sum of its samples' by their number.

    It is not for ignored labels and for weights of classes, because the mean divides by the
    samples that count, or by their weights; nor where the mean is over the numbers of each
    sample too. Nothing is sent: class numbers are tried with equal scores, in which every
    rank sees the same, and other labels as they are.
    """
    if isinstance(loss_of, nn.Module):
        raise TypeError(
            f"{type(loss_of).__name__} takes its reduction when it is made: give the "
            "function of torch.nn.functional, such as cross_entropy"
        )
    if not labels.is_floating_point():
        if bool((labels < 0).any()):
            raise ValueError(
                f"a label of {int(labels.min())} counts in no loss: leave it out, and out of "
                "`batch`"
            )
        if output.dim() > 1 and bool((labels >= output.shape[1]).any()):
            raise ValueError(
                f"a label of {int(labels.max())} is none of {output.shape[1]} classes: leave "
                "out what counts in no loss, and out of `batch`"
            )
        if output.dim() > 1:
            if output.shape[1] > MIDDLE:
                require_no_weights(loss_of)
            is_fixed = isinstance(loss_of, FunctionType | BuiltinFunctionType)
            is_fixed = is_fixed and not getattr(loss_of, "__closure__", None)
            # others may have other weights by the next step, so they are tried each time
            tried = require_equal_classes if is_fixed else require_equal_classes.__wrapped__
            tried(loss_of, output.shape[1], output.dtype, output.device)
    if len(labels) and (labels.is_floating_point() or labels.dim() > 1):
        own = output.detach(), labels
        total, mean = (float(loss_of(*own, reduction=how)) for how in ("sum", "mean"))
        if not is_near(total, len(labels) * mean, output.dtype):
            raise ValueError(
                f"the mean of this loss over labels {tuple(labels.shape)} is {mean:.4g}, and "
                f"its sum over {len(labels)} samples {total:.4g}: let loss_of take the mean "
                'of each sample first, by reduction="none" and .flatten(1).mean(1)'
            )


def require_no_weights(loss_of: Callable) -> None:
    """ValueError for a partial whose keywords let classes count unequally."""
    given = loss_of.keywords if isinstance(loss_of, partial) else {}
    for name, usual in {"weight": None, "ignore_index": -100}.items():
        if given.get(name, usual) is not usual and given[name] != usual:
            raise ValueError(
                f"this loss has a {name}, so the mean of one process would divide by what "
                "counts, and not by the batch: leave weight and ignore_index out"
            )


@lru_cache
def require_equal_classes(
    loss_of: Callable, classes: int, dtype: torch.dtype, device: torch.device
) -> None:
    """ValueError unless a sample counts as much in one class as in another."""
    tried = torch.arange(classes, device=device)
    scores = torch.ones(1, classes, dtype=dtype, device=device)
    if classes > 64:  # both ends, and of the middle those blocks that add other than sixteen
        ends, middle = torch.cat([tried[:32], tried[-32:]]), tried[32:-32]
        one = float(loss_of(scores, tried[:1], reduction="sum"))
        for block in middle.split(16) if classes <= MIDDLE else ():
            many = scores.expand(len(block), classes)
            total = float(loss_of(many, block, reduction="sum"))
            if not is_near(total, len(block) * one, dtype, 0.01):
                ends = torch.cat([ends, block])
        tried = ends
    each = [float(loss_of(scores, one, reduction="sum")) for one in tried.split(1)]
    for number, counted in zip(tried.tolist(), each, strict=True):
        if not is_near(counted, each[0], torch.float32):
            raise ValueError(
                f"with equal scores a sample of class {number} adds {counted:.4g} to this "
                f"loss, and one of class 0 {each[0]:.4g}: the mean of one process would "
                "divide by what counts, and not by the batch, so leave weight and "
                "ignore_index out"
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
