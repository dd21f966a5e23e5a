"""One process, written out: the model of the chapter on a whole batch."""

import torch
from torch.nn.functional import cross_entropy

from mgpu_tutorial.shared.models import SmallTransformer


def new_model(dtype=torch.float64):
    torch.manual_seed(0)
    return SmallTransformer(vocabulary=64, width=32, heads=4, depth=3).to(dtype)


def train(model):
    """Each of 24 sequences of eight tokens predicts its next seven."""
    tokens = torch.randint(64, (24, 8), generator=torch.Generator().manual_seed(0))
    cross_entropy(model(tokens)[:, :-1].transpose(1, 2), tokens[:, 1:]).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]
