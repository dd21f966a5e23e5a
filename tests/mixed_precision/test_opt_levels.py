"""Each level has its dtypes, and takes the steps that are written out here."""

import pytest
import torch
from torch.nn.functional import nll_loss

from mgpu_tutorial.mixed_precision import opt_levels
from mgpu_tutorial.shared.data import digits
from mgpu_tutorial.shared.models import SmallConvNet

LR, MOMENTUM = 0.005, 0.5


def trained_by_hand(steps, weights, autocast):
    """The loss over 600 digits before and after, with SGD written out."""
    torch.manual_seed(0)
    model, data = SmallConvNet().to(weights), digits()
    params = list(model.parameters())
    velocity = [torch.zeros_like(p) for p in params]

    def loss(first, end):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = model(data.images[first:end].to(weights))
        return nll_loss(output.float(), data.labels[first:end])

    with torch.no_grad():
        before = loss(0, 600).item()
    for step in range(steps):
        first = 30 * (step % 20)
        gradients = torch.autograd.grad(loss(first, first + 30), params)
        with torch.no_grad():
            for p, v, g in zip(params, velocity, gradients, strict=True):
                v.mul_(MOMENTUM).add_(g)
                p.add_(v, alpha=-LR)
    with torch.no_grad():
        return before, loss(0, 600).item()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, steps, weights, autocast",
    [
        ("float32", 22, torch.float32, False),  # the twenty batches begin again
        ("torch.autocast", 5, torch.float32, True),
        ("model.bfloat16()", 5, torch.bfloat16, False),
    ],
)
def test_a_level_takes_the_steps_of_sgd_written_out(name, steps, weights, autocast):
    level = opt_levels.LEVELS[name]
    expected = trained_by_hand(steps, weights, autocast)
    assert opt_levels.train_at_level(level, LR, steps) == pytest.approx(expected, abs=1e-5)
