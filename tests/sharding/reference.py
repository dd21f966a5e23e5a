"""The model that the tests of this chapter train, its batches, and one process by hand."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from mgpu_tutorial.shared.models import SmallTransformer

VOCABULARY = 37
OPTIMIZERS = {
    "gradient": (torch.optim.SGD, {"lr": 1.0}),  # one step subtracts the gradient
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
}


def new_model(dtype=torch.float64, tied=True, frozen=False, unused=False):
    """Sizes that no number of ranks divides: a norm has 5 numbers, the embedding 185."""
    torch.manual_seed(0)
    model = SmallTransformer(VOCABULARY, width=5, heads=1, depth=2, tied=tied)
    if unused:
        model.unused = nn.ModuleList([nn.Linear(3, 1)])  # a unit of its own
    model.register_buffer("mark", torch.zeros(1))
    model.to(dtype)
    if frozen:
        model.position.weight.requires_grad_(False)
        model.blocks[0].mlp.up.weight.requires_grad_(False)
    return model


def batches(step, parts):
    """The step's twelve sequences in equal parts."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (12, 8), generator=generator).chunk(parts)


def loss_on(model, tokens):
    return cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def loss_of(model, step):
    """The loss on this rank's part of the step's batch."""
    return loss_on(model, batches(step, dist.get_world_size())[dist.get_rank()])


def trained(parameters):
    return [p for p in parameters if p.requires_grad]


def values(module):
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def train_alone(optimizer, steps, parts=1, **kind):
    """The parameters after some steps of one process.

    A step takes the mean of the gradients of the parts of a batch, in their order.
    """
    model = new_model(**kind)
    chosen, settings = OPTIMIZERS[optimizer]
    stepper = chosen(trained(model.parameters()), **settings)
    for step in range(steps):
        stepper.zero_grad()
        for tokens in batches(step, parts):
            loss_on(model, tokens).backward()
        for p in trained(model.parameters()):
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad / parts
        stepper.step()
    return values(model)


def mean_gradients(steps=(0,)):
    """The gradients of one process, added up over the batches of some steps."""
    model = new_model()
    for step in steps:
        loss_on(model, *batches(step, 1)).backward()
    return {name: p.grad for name, p in model.named_parameters()}
