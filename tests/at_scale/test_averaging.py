"""Averaging models is DDP where it happens after every step."""

import torch
from torch import nn

from mgpu_tutorial.at_scale import averaging


def test_models_averaged_after_every_step_are_those_of_one_process(ranks):
    """The same model and SGD on the data of all three ranks together."""
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(3, 8, 32, 16, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1)).double()
    for x in data.transpose(0, 1).reshape(8, 3 * 32, 16):
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.data -= 0.1 * gradient
    expected = nn.utils.parameters_to_vector(model.parameters()).detach()
    for found in ranks(3, averaging.local_sgd, 1, data).results:
        assert torch.allclose(found, expected, rtol=0, atol=1e-13)
