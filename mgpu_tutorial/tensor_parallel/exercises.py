"""Only for the exercises: a step of sequence parallel with a planted bug."""

import torch
from torch import nn

from mgpu_tutorial.shared.parameters import fingerprint
from mgpu_tutorial.tensor_parallel.copies import replicated
from mgpu_tutorial.tensor_parallel.sequence import sum_replicated_gradients
from mgpu_tutorial.tensor_parallel.training import in_slices, loss_and_gradients, new_model

FORGOTTEN = ["blocks.0.mlp.down.bias", "blocks.1.mlp.down.bias"]


def fingerprints(rank: int, world_size: int) -> dict[str, str]:
    """A step with sequence parallel and a bug; the bits of each whole parameter by name."""
    prepared = in_slices(new_model())
    prepared = prepared._replace(after_backward=lambda: None)
    loss_and_gradients(prepared)
    kept = {name: p.grad for name, p in replicated(prepared.model).items()}
    for name in FORGOTTEN:
        prepared.model.get_parameter(name).grad = None  # hidden from the sum
    sum_replicated_gradients(prepared.model)
    for name in FORGOTTEN:
        prepared.model.get_parameter(name).grad = kept[name]
    torch.optim.SGD(prepared.model.parameters(), lr=0.1).step()
    whole = replicated(prepared.model)
    return {name: fingerprint(nn.ParameterList([p])) for name, p in whole.items()}
