"""One process, written out: the model of the chapter on the whole batch of each step."""

import torch
from torch.nn.functional import cross_entropy

from mgpu_tutorial.shared.models import SmallTransformer


def new_model(dtype=torch.float64):
    torch.manual_seed(0)
    return SmallTransformer(vocabulary=64, width=32, heads=4, depth=3).to(dtype)


def loss_of(model, step=0):
    """Each of 24 sequences of eight tokens predicts its next seven."""
    tokens = torch.randint(64, (24, 8), generator=torch.Generator().manual_seed(step))
    return cross_entropy(model(tokens)[:, :-1].transpose(1, 2), tokens[:, 1:])


def gradients(step=0):
    model = new_model()
    loss_of(model, step).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def adam_step():
    """The model after an ordinary step of Adam, and the optimizer with its moments."""
    model = new_model(torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_of(model).backward()
    optimizer.step()
    return model, optimizer
