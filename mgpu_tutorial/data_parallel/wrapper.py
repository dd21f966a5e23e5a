"""The four stages of a forward on several devices, and BatchNorm over all ranks.

`torch.nn.DataParallel` calls the same four
(https://docs.pytorch.org/docs/2.14/generated/torch.nn.DataParallel.html).
"""

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.nn.functional import all_reduce
from torch.nn.functional import cross_entropy

from mgpu_tutorial.lab import place

Devices = Sequence[torch.device]


def scatter(batch: torch.Tensor, devices: Devices) -> list[torch.Tensor]:
    """Cut a batch into pieces along dimension 0; piece r goes to device r."""
    pairs = zip(batch.chunk(len(devices)), devices, strict=False)
    return [place(piece, device) for piece, device in pairs]


def gather(outputs: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Join the outputs of all devices on one, in their order; single numbers to a vector."""
    moved = [place(output, device) for output in outputs]
    return torch.cat(moved) if moved[0].dim() else torch.stack(moved)


def replicate(module: nn.Module, devices: Devices) -> list[nn.Module]:
    """A copy of the module for each device, through which gradients find the original."""
    replicas = []
    for device in devices:
        tensors = [*module.parameters(), *module.buffers()]
        # a view is the result of an operation: its gradient flows on to its tensor
        copies = {id(t): place(t.view_as(t), device) for t in tensors}
        # before deepcopy copies an object, it looks here: the tensors are done already
        replicas.append(copy.deepcopy(module, copies))
    return replicas


def parallel_apply(
    replicas: Sequence[nn.Module], inputs: Sequence[tuple[torch.Tensor, ...]]
) -> list[torch.Tensor]:
    """Replica r works on input r in a thread; returns the outputs in their order."""
    grad = torch.is_grad_enabled()  # a new thread begins with its own, and without autocast
    kind = "cuda" if torch.is_autocast_enabled("cuda") else "cpu"
    short = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)

    def run(replica: nn.Module, pieces: tuple[torch.Tensor, ...]) -> torch.Tensor:
        with torch.set_grad_enabled(grad), torch.autocast(kind, *short):
            return replica(*pieces)

    with ThreadPoolExecutor(len(replicas)) as threads:
        return list(threads.map(run, replicas, inputs))


class DataParallel(nn.Module):
    """The first device hands out pieces and copies, all compute, the first one collects.

    Each replica's BatchNorm normalises its own piece, and the running statistics are those of
    the first device. The module returns one tensor; PyTorch's joins tuples and dicts too.
    """

    def __init__(self, module: nn.Module, devices: Devices) -> None:
        super().__init__()
        self.module, self.devices = module, devices

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        scattered = [scatter(each, self.devices) for each in inputs]
        pieces = list(zip(*scattered, strict=True))  # by device
        if len(pieces) == 1:
            return self.module(*pieces[0])
        replicas = replicate(self.module, self.devices[: len(pieces)])
        outputs = parallel_apply(replicas, pieces)
        return gather(outputs, self.devices[0])


class WithLoss(nn.Module):
    """Computes the loss where the outputs are: every replica returns one number.

    The mean of these means is the batch's for equal pieces only: for others take "sum".
    """

    def __init__(self, module: nn.Module, reduction: str = "mean") -> None:
        super().__init__()
        self.module, self.reduction = module, reduction

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.module(images), labels, reduction=self.reduction)


def sync_batch_norm(
    images: torch.Tensor, eps: float = 1e-5, group: ProcessGroup | None = None
) -> torch.Tensor:
    """Normalise each channel of (N, C, H, W) over the images of all ranks of `group`.

    Without a group these are all ranks. All ranks have equally many channels. Sums of squares
    in float64 have a variance to a percent where the mean is up to 10⁷ deviations from zero.
    """
    channels = images.transpose(0, 1).flatten(1)  # (C, N × H × W)
    channels = channels.double()  # a variance is a small difference
    count = channels.new_full((len(channels),), channels.shape[1])
    sums = torch.stack([count, channels.sum(1), channels.square().sum(1)])
    # one message; its backward is one too
    count, total, squares = all_reduce(sums, group=group)
    mean = (total / count).view(-1, 1, 1)
    variance = (squares / count).view(-1, 1, 1) - mean**2
    return ((images - mean) / (variance + eps).sqrt()).to(images.dtype)
