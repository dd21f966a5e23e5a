"""What DataParallel is tried on: networks that show what happens in them, one experiment."""

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.data_parallel.checks import Devices
from mgpu_tutorial.data_parallel.wrapper import DataParallel
from mgpu_tutorial.shared.data import Pictures, pictures


class PixelNet(nn.Module):
    """Says for each pixel of (N, 3, H, W) which of `classes` it is: (N, classes, H, W)."""

    def __init__(self, hidden: int = 16, classes: int = 20) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, hidden, 3, padding=1)
        self.norm = nn.BatchNorm2d(hidden)
        self.head = nn.Conv2d(hidden, classes, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.conv(images))))


class WithLoss(nn.Module):
    """Computes the loss where the outputs are: every replica returns one number."""

    def __init__(self, module: nn.Module, reduction: str = "mean") -> None:
        super().__init__()
        self.module, self.reduction = module, reduction

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.module(images), labels, reduction=self.reduction)


class Counting(nn.Module):
    """Counts its calls in an attribute and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("calls_in_buffer", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.calls_in_buffer += 1
        return x


# The experiment: MobileNetV2 on small pictures that are enlarged, batch 256 on 4 devices

BATCH, SIDE = 256, 112


def mobilenet(
    steps: int, device: torch.device | str = "cpu"
) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """MobileNetV2 for ten classes on `device`, SGD, and a cosine schedule over `steps`."""
    from mgpu_tutorial.shared.vision import torchvision  # seconds: only for who needs it

    net = torchvision.models.mobilenet_v2(num_classes=10).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    return net, optimizer, schedule


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    batches: Iterable[tuple[torch.Tensor, torch.Tensor]],
    home: torch.device,
) -> list[tuple[float, float]]:
    """Take a step for each batch, the loss on `home`; returns each (loss, learning rate)."""
    history = []
    for images, labels in batches:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels.to(home))
        loss.backward()
        history.append((loss.item(), schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
    return history


def shuffled_batches(
    data: Pictures, steps: int, batch: int, side: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`steps` batches of `batch` pictures in an order that is drawn once, round and round."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    for step in range(steps):
        index = order[torch.arange(step * batch, (step + 1) * batch) % len(data)]
        yield data.batch(index, side)


def train_mobilenet(
    devices: Devices, steps: int, batch: int = BATCH, side: int = SIDE
) -> list[tuple[float, float]]:
    """Train through DataParallel; returns (loss, learning rate) of each step."""
    net, optimizer, schedule = mobilenet(steps, devices[0])
    batches = shuffled_batches(pictures(), steps, batch, side)
    return train(DataParallel(net, devices), optimizer, schedule, batches, devices[0])
