"""Training on gradients of a wrong length: what does the loss show of it?"""

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from mgpu_tutorial.wrong_gradient import job

OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.02),
    "SGD, clipped": lambda parameters: torch.optim.SGD(parameters, lr=0.2),
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
}


def losses(
    rank: int, world_size: int, optimizer: str, factor: float, steps: int = 40
) -> list[float]:
    """Train alone with gradients `factor` times too long; the loss of each step."""
    model, seen = job.new_model(), []
    stepper = OPTIMIZERS[optimizer](model.parameters())
    for step in range(steps):
        x, targets = job.batch_of(step)
        loss = cross_entropy(model(x).flatten(0, 1), targets.flatten())
        loss.backward()
        for parameter in model.parameters():
            parameter.grad *= factor
        if optimizer == "SGD, clipped":
            clip_grad_norm_(model.parameters(), 0.25)
        stepper.step()
        stepper.zero_grad()
        seen.append(loss.item())
    return seen
