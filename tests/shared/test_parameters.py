"""A fingerprint stands for every bit of every parameter."""

import pytest
import torch
from torch import nn

from mgpu_tutorial.shared.parameters import fingerprint


def mixed():
    """Layers of three dtypes, from the same seed each time."""
    torch.manual_seed(0)
    kinds = (torch.float32, torch.float64, torch.bfloat16)
    return nn.Sequential(*(nn.Linear(3, 3, dtype=kind) for kind in kinds))


@pytest.mark.parametrize("name", [name for name, _ in mixed().named_parameters()])
def test_the_last_bit_of_any_parameter_counts(name):
    changed = mixed()
    assert fingerprint(changed) == fingerprint(mixed()) and len(fingerprint(changed)) == 8
    last = changed.get_parameter(name).data.view(-1)[-1:]
    last.copy_(torch.nextafter(last, torch.full_like(last, float("inf"))))
    assert fingerprint(changed) != fingerprint(mixed())
