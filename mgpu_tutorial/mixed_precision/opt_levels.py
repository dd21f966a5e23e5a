"""The four opt levels of an old extension, O0 to O3, written with today's PyTorch."""

import torch
from torch import nn
from torch.nn.functional import nll_loss

from mgpu_tutorial.distributed_sgd import new_model
from mgpu_tutorial.mixed_precision.precision import autocast, observe, short
from mgpu_tutorial.shared.data import digits


class MasterWeights:
    """SGD on float32 copies of a model in 16 bits, which then gets them rounded (O2)."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.low = list(model.parameters())
        self.master = [p.detach().float() for p in self.low]
        self.optimizer = torch.optim.SGD(self.master, lr=lr, momentum=0.5)

    def step(self) -> None:
        for master, low in zip(self.master, self.low, strict=True):
            master.grad = low.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for master, low in zip(self.master, self.low, strict=True):
                low.copy_(master)


def check_level(level: str) -> None:
    """ValueError for anything but one of the four names."""
    if level not in ("O0", "O1", "O2", "O3"):
        raise ValueError(f"level must be O0, O1, O2 or O3, got {level!r}")


def opt_level(level: str, lr: float = 0.005, steps: int = 30) -> dict[str, str | float]:
    """Train the digits as the old "O0" to "O3" did, in today's terms, with bfloat16.

    Returns the dtypes of the weights, of what a convolution returns and of the gradients,
    and the loss over 600 digits before and after. ValueError for another level.
    """
    check_level(level)
    data, (model, optimizer) = digits(), new_model(lr=lr)
    low = torch.bfloat16 if level in ("O2", "O3") else torch.float32
    model.to(low)
    if level == "O2":
        optimizer = MasterWeights(model, lr)
    elif level == "O3":
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    forward = autocast("cpu", torch.bfloat16 if level == "O1" else torch.float32)
    with torch.no_grad():
        start = nll_loss(model(data.images[:600].to(low)).float(), data.labels[:600])
    for step in range(steps):
        mine = slice(step % 10 * 100, step % 10 * 100 + 100)
        model.zero_grad()
        with forward:
            output = model(data.images[mine].to(low))
        nll_loss(output.float(), data.labels[mine]).backward()
        optimizer.step()
    with forward:
        outputs = observe(model, data.images[:1].to(low))
        loss = nll_loss(model(data.images[:600].to(low)).float(), data.labels[:600])
    return {
        "weights": short(model.conv1.weight.dtype),
        "conv1 returns": outputs["conv1"],
        "gradients": short(model.conv1.weight.grad.dtype),
        "start": start.item(),
        "loss": loss.item(),
    }
